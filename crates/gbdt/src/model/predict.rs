//! Predictions for raw rows.

use lockstep_kernels::Team;

use crate::data::Table;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::shap::TreeShap;
use crate::objective::transform;
use crate::par::{Disjoint, for_each};

/// Output of a prediction for each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PredictionKind {
    /// Predictions: probabilities, counts, values.
    Predictions,
    /// Sums of the trees.
    Margins,
    /// Contribution of each feature to the margin, and the expected margin at the end (TreeSHAP).
    Contributions,
    /// Leaf of each tree.
    Leaves,
}

impl Model {
    /// Predictions of one row, one per output. NaN is a missing value; missing features at the end may be left out.
    pub fn predict_row(&self, row: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; self.outputs];
        self.margins_of(row, &mut out);
        transform(self.objective, &mut out);
        out
    }

    fn margins_of(&self, row: &[f32], out: &mut [f32]) {
        out.iter_mut().enumerate().for_each(|(k, out)| *out = self.base_margin(k));
        let value = |feature: usize| row.get(feature).copied().unwrap_or(f32::NAN);
        for (tree, output) in self.used_trees() {
            out[output] += tree.threshold[tree.leaf(value)];
        }
    }

    /// The trees that predictions use: those up to the best round.
    fn used_trees(&self) -> impl Iterator<Item = (&crate::model::Tree, usize)> {
        let count = self.best_round.map_or(self.trees.len(), |round| (round + 1) * self.outputs);
        self.trees.iter().zip(self.output_of_tree.iter().copied()).take(count)
    }

    /// Numbers per row.
    pub fn width(&self, kind: PredictionKind) -> usize {
        match kind {
            PredictionKind::Predictions | PredictionKind::Margins => self.outputs,
            PredictionKind::Contributions => self.outputs * (self.features.len() + 1),
            PredictionKind::Leaves => self.used_trees().count(),
        }
    }

    /// Predictions of a table, row by row.
    pub fn predict(&self, table: &Table, kind: PredictionKind, team: &Team) -> Result<Vec<f32>> {
        let columns = self.columns(table)?;
        let width = self.width(kind);
        let mut out = vec![0.0; table.rows() * width];
        let features = self.features.len();
        let block = (1 << 18) / features.max(1);
        let block = block.clamp(8, 1024);
        let mut tasks = Vec::new();
        let mut first = 0;
        for chunk in &table.chunks {
            for start in (0..chunk.rows).step_by(block) {
                tasks.push((chunk, start..(start + block).min(chunk.rows), first + start));
            }
            first += chunk.rows;
        }
        let shap =
            (kind == PredictionKind::Contributions).then(|| TreeShap::new(self.used_trees()));
        let target = Disjoint::new(&mut out);
        for_each(team, tasks.len(), &|task| {
            let (chunk, range, first) = &tasks[task];
            let mut values = vec![f32::NAN; range.len() * features];
            for (feature, column) in columns.iter().enumerate() {
                chunk.column(*column, range.clone(), |row, value| {
                    values[(row - range.start) * features + feature] = value;
                });
            }
            // SAFETY: the tasks are disjoint rows.
            let out = unsafe { target.range(first * width..(first + range.len()) * width) };
            for (index, out) in out.chunks_exact_mut(width.max(1)).enumerate() {
                let row = &values[index * features..][..features];
                match kind {
                    PredictionKind::Margins => self.margins_of(row, out),
                    PredictionKind::Predictions => {
                        self.margins_of(row, out);
                        transform(self.objective, out);
                    }
                    PredictionKind::Leaves => {
                        for ((tree, _), out) in self.used_trees().zip(out) {
                            *out = tree.leaf(|feature| row[feature]) as f32;
                        }
                    }
                    PredictionKind::Contributions => {
                        let shap = shap.as_ref().expect("prepared above");
                        for (output, out) in out.chunks_exact_mut(features + 1).enumerate() {
                            let base = f64::from(self.base_margin(output));
                            shap.contributions(output, row, base, out);
                        }
                    }
                }
            }
        });
        Ok(out)
    }

    /// The column of each feature: by name, or by position if the model has default names.
    fn columns(&self, table: &Table) -> Result<Vec<usize>> {
        let find = |name: &str| table.names.iter().position(|other| other == name);
        let by_name: Option<Vec<usize>> =
            self.features.iter().map(|feature| find(&feature.name)).collect();
        if let Some(columns) = by_name {
            return Ok(columns);
        }
        let numbered = Table::numbered(self.features.len());
        let is_numbered = self.features.iter().map(|f| &f.name).eq(&numbered);
        if is_numbered && table.features() == self.features.len() {
            return Ok((0..self.features.len()).collect());
        }
        let missing: Vec<&str> = self
            .features
            .iter()
            .map(|feature| feature.name.as_str())
            .filter(|name| find(name).is_none())
            .take(5)
            .collect();
        Err(Error::Input(format!("the data does not have the features {}", missing.join(", "))))
    }
}
