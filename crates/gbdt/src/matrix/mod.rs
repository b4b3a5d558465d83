//! Binned data of one rank: rows as bin numbers, with labels, weights and groups.

mod bin;
mod cuts;
mod layout;
mod section;
pub(crate) mod select;
mod sketch;
mod store;

pub use cuts::{Cuts, FeatureCuts};
pub use layout::{Layout, Storage};
pub use section::Section;
pub use sketch::sketch;
pub use store::Cache;

use lockstep_comm::{Group, Op};
use lockstep_kernels::Team;

use crate::collective::{all_succeed, gather_counts};
use crate::data::Table;
use crate::error::{Error, Result};

/// Name and categories of a feature.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Feature {
    pub name: String,
    /// Words of the categories; empty if the codes are the categories, `None` if the feature is numeric.
    pub categories: Option<Vec<String>>,
}

/// Largest number of rows of all ranks: sums of fixed-point gradients have 32 bits.
pub const MAX_ROWS: u64 = 1 << 30;

/// Binned rows of one rank.
pub struct Matrix {
    pub features: Vec<Feature>,
    pub cuts: Cuts,
    pub layout: Layout,
    /// Rows of this rank.
    pub rows: usize,
    /// Number of rows of lower ranks.
    pub first_row: u64,
    /// Rows of all ranks.
    pub total_rows: u64,
    /// Features that are stored in bytes, and their bins (rows × features).
    pub byte_features: Vec<u32>,
    pub bytes: Section<u8>,
    /// The same bins by column (features × rows), for dividing the rows of a node.
    pub byte_columns: Section<u8>,
    /// Features that are stored in words, and their bins (rows × features).
    pub word_features: Vec<u32>,
    pub words: Section<u16>,
    /// First sparse entry of each row, and the end; empty without sparse features.
    pub entry_starts: Section<u32>,
    /// Histogram slots of the present values of sparse features, increasing within a row.
    pub entries: Section<u32>,
    /// First value of each sparse feature, and the end; the values' rows, increasing within a feature; and their bins.
    pub value_starts: Section<u32>,
    pub value_rows: Section<u32>,
    pub value_bins: Section<u16>,
    /// Empty if the data has no labels.
    pub label: Section<f32>,
    /// Empty if all weights are 1.
    pub weight: Section<f32>,
    /// First row of each group, and the end; empty without groups.
    pub groups: Section<u32>,
}

impl Matrix {
    /// Bins a table. Cuts are computed from the rows of all ranks, or given, for example those of the training data for
    /// an evaluation set. Collective.
    ///
    /// ```
    /// use lockstep_comm::single_rank;
    /// use lockstep_gbdt::{Matrix, Table, Team};
    ///
    /// let table = Table::dense(vec!["x".into()], vec![3.0, 1.0, f32::NAN], vec![1.0, 0.0, 1.0]);
    /// let matrix = Matrix::new(&single_rank(), &table, None, 256, &Team::new(1))?;
    /// assert_eq!(matrix.cuts.features[0].thresholds, [3.0]);
    /// assert_eq!(&matrix.bytes[..], [1, 0, 2]);
    /// # Ok::<(), lockstep_gbdt::Error>(())
    /// ```
    pub fn new(
        group: &Group,
        table: &Table,
        cuts: Option<&Cuts>,
        max_bin: usize,
        team: &Team,
    ) -> Result<Matrix> {
        all_succeed(group, check(table))?;
        let counts = gather_counts(group, table.rows() as u64)?;
        let total_rows = counts.iter().sum();
        if total_rows > MAX_ROWS {
            return Err(Error::Input(format!(
                "{total_rows} rows; at most {MAX_ROWS} are supported"
            )));
        }
        let cuts = match cuts {
            Some(cuts) if cuts.features.len() != table.features() => {
                return Err(Error::Input(format!(
                    "the data has {} features, expected {}",
                    table.features(),
                    cuts.features.len()
                )));
            }
            Some(cuts) => refit(group, table, cuts, team)?,
            None => sketch(group, table, max_bin, team)?,
        };
        let layout = Layout::new(&cuts, total_rows, group.size());
        let place = bin::Place { first_row: counts[..group.rank()].iter().sum(), total_rows };
        all_succeed(group, bin::bin(table, cuts, layout, place, team))
    }

    /// Whether the rows have labels.
    pub fn is_labeled(&self) -> bool {
        self.label.len() == self.rows
    }

    pub fn weight_of(&self, row: usize) -> f32 {
        if self.weight.is_empty() { 1.0 } else { self.weight[row] }
    }

    /// Bytes of the binned values.
    pub fn stored_bytes(&self) -> usize {
        self.bytes.len()
            + self.byte_columns.len()
            + 2 * self.words.len()
            + 4 * (self.entries.len() + self.entry_starts.len())
            + 6 * self.value_rows.len()
    }

    /// Rows and bins of the present values of a sparse feature.
    pub(crate) fn sparse_values(&self, feature: usize) -> (&[u32], &[u16]) {
        let range = self.value_starts[feature] as usize..self.value_starts[feature + 1] as usize;
        (&self.value_rows[range.clone()], &self.value_bins[range])
    }

    /// Position of a feature in its block of dense columns.
    pub(crate) fn dense_column(&self, feature: usize) -> usize {
        let list = match self.layout.storage[feature] {
            Storage::Bytes => &self.byte_features,
            Storage::Words => &self.word_features,
            Storage::Sparse => unreachable!("the column is dense"),
        };
        list.binary_search(&(feature as u32)).expect("every dense feature is listed")
    }
}

/// The thresholds of other data, with the missing values of this one. Features without values there have none here.
fn refit(group: &Group, table: &Table, cuts: &Cuts, team: &Team) -> Result<Cuts> {
    let mut present = crate::par::map(team, table.features(), &|feature| {
        let mut count = 0;
        for chunk in &table.chunks {
            chunk.column(feature, 0..chunk.rows, |_, _| count += 1);
        }
        count
    });
    group.all_reduce(&mut present, Op::Sum)?;
    let total: u64 = gather_counts(group, table.rows() as u64)?.iter().sum();
    let mut cuts = cuts.clone();
    for (feature, present) in cuts.features.iter_mut().zip(present) {
        // A category that the other data does not have is missing.
        feature.missing = (present as u64) < total || feature.categories > 0;
        feature.present = if feature.present > 0 { (present as u64).max(1) } else { 0 };
    }
    Ok(cuts)
}

fn check(table: &Table) -> Result<()> {
    let rows = table.rows();
    for (what, count) in [
        ("labels", if table.label.is_empty() { rows } else { table.label.len() }),
        ("weights", table.weight.as_ref().map_or(rows, Vec::len)),
        ("groups", table.group.as_ref().map_or(rows, Vec::len)),
    ] {
        if count != rows {
            return Err(Error::Input(format!("{count} {what} for {rows} rows")));
        }
    }
    if let Some(row) = table.label.iter().position(|label| !label.is_finite()) {
        return Err(Error::Input(format!("the label of row {row} is {}", table.label[row])));
    }
    let weights = table.weight.iter().flatten();
    if let Some((row, weight)) =
        weights.enumerate().find(|(_, weight)| !(**weight >= 0.0 && weight.is_finite()))
    {
        return Err(Error::Input(format!("the weight of row {row} is {weight}")));
    }
    Ok(())
}
