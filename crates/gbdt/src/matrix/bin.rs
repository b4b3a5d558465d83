//! Values → bin numbers.

use lockstep_kernels::Team;

use crate::data::{Chunk, Table};
use crate::error::{Error, Result};
use crate::matrix::cuts::Cuts;
use crate::matrix::layout::{Layout, Storage};
use crate::matrix::section::Section;
use crate::matrix::{Feature, Matrix};
use crate::par::{Disjoint, for_each};

/// Rows that a thread bins at a time.
const BLOCK_ROWS: usize = 4096;

/// The rows of a rank among those of all ranks.
pub(crate) struct Place {
    pub first_row: u64,
    pub total_rows: u64,
}

/// A block of consecutive rows of a chunk.
struct Block<'a> {
    chunk: &'a Chunk,
    rows: std::ops::Range<usize>,
    /// Row of the rank at which the block starts.
    first: usize,
}

pub(crate) fn bin(
    table: &Table,
    cuts: Cuts,
    layout: Layout,
    place: Place,
    team: &Team,
) -> Result<Matrix> {
    let rows = table.rows();
    let of = |storage: Storage| {
        let all = layout.storage.iter().enumerate().filter(move |(_, other)| **other == storage);
        all.map(|(feature, _)| feature as u32).collect::<Vec<u32>>()
    };
    let (byte_features, word_features) = (of(Storage::Bytes), of(Storage::Words));
    let sparse = of(Storage::Sparse);
    let mut blocks = Vec::new();
    let mut first = 0;
    for chunk in &table.chunks {
        for start in (0..chunk.rows).step_by(BLOCK_ROWS) {
            let rows = start..(start + BLOCK_ROWS).min(chunk.rows);
            blocks.push(Block { chunk, first: first + start, rows });
        }
        first += chunk.rows;
    }
    let (mut bytes, mut words) =
        (vec![0u8; rows * byte_features.len()], vec![0u16; rows * word_features.len()]);
    {
        let (byte_out, word_out) = (Disjoint::new(&mut bytes), Disjoint::new(&mut words));
        for_each(team, blocks.len(), &|index| {
            let block = &blocks[index];
            // SAFETY: blocks are disjoint rows.
            let out = unsafe { byte_out.range(span(block, byte_features.len())) };
            dense(block, &cuts, &byte_features, out, |bin| bin as u8);
            // SAFETY: blocks are disjoint rows.
            let out = unsafe { word_out.range(span(block, word_features.len())) };
            dense(block, &cuts, &word_features, out, |bin| bin as u16);
        });
    }
    let byte_columns = transposed(&bytes, rows, byte_features.len(), team);
    let (entry_starts, entries) = sparse_rows(&blocks, rows, &cuts, &layout, &sparse)?;
    let by_column = sparse_columns(&entry_starts, &entries, &layout);
    let features = table.names.iter().zip(&table.categories);
    Ok(Matrix {
        features: features
            .map(|(name, categories)| Feature {
                name: name.clone(),
                categories: categories.clone(),
            })
            .collect(),
        cuts,
        layout,
        rows,
        first_row: place.first_row,
        total_rows: place.total_rows,
        byte_features,
        bytes: Section::Memory(bytes),
        byte_columns: Section::Memory(byte_columns),
        word_features,
        words: Section::Memory(words),
        entry_starts: Section::Memory(entry_starts),
        entries: Section::Memory(entries),
        value_starts: Section::Memory(by_column.0),
        value_rows: Section::Memory(by_column.1),
        value_bins: Section::Memory(by_column.2),
        label: Section::Memory(table.label.clone()),
        weight: Section::Memory(table.weight.clone().unwrap_or_default()),
        groups: Section::Memory(group_starts(table.group.as_deref())?),
    })
}

/// The bins by column.
fn transposed(bytes: &[u8], rows: usize, columns: usize, team: &Team) -> Vec<u8> {
    let mut out = vec![0; bytes.len()];
    let parts = crate::par::pieces(rows, BLOCK_ROWS, usize::MAX);
    let target = Disjoint::new(&mut out);
    for_each(team, parts.len(), &|part| {
        for column in 0..columns {
            let range = column * rows + parts[part].start..column * rows + parts[part].end;
            // SAFETY: the parts are disjoint rows.
            let out = unsafe { target.range(range) };
            for (out, row) in out.iter_mut().zip(parts[part].clone()) {
                *out = bytes[row * columns + column];
            }
        }
    });
    out
}

fn span(block: &Block<'_>, columns: usize) -> std::ops::Range<usize> {
    block.first * columns..(block.first + block.rows.len()) * columns
}

/// Bins of the dense columns `features` of a block, row by row.
fn dense<T: Copy>(
    block: &Block<'_>,
    cuts: &Cuts,
    features: &[u32],
    out: &mut [T],
    convert: impl Fn(usize) -> T,
) {
    let stride = features.len();
    for (column, feature) in features.iter().enumerate() {
        let cuts = &cuts.features[*feature as usize];
        let (bins, finder) = (cuts.bins(), cuts.finder());
        if cuts.missing {
            out.iter_mut().skip(column).step_by(stride).for_each(|out| *out = convert(bins));
        }
        block.chunk.column(*feature as usize, block.rows.clone(), |row, value| {
            let bin = finder.bin(value);
            // A category of an evaluation set that the training data does not have is missing.
            let bin = if cuts.categories > 0 && bin >= bins { bins } else { bin };
            out[(row - block.rows.start) * stride + column] = convert(bin);
        });
    }
}

/// Slots of sparse columns, row by row.
fn sparse_rows(
    blocks: &[Block<'_>],
    rows: usize,
    cuts: &Cuts,
    layout: &Layout,
    features: &[u32],
) -> Result<(Vec<u32>, Vec<u32>)> {
    if features.is_empty() {
        return Ok((Vec::new(), Vec::new()));
    }
    let mut starts = vec![0u64; rows + 1];
    let each = |visit: &mut dyn FnMut(usize, u32)| {
        for feature in features.iter().map(|feature| *feature as usize) {
            let (cuts, start) = (&cuts.features[feature], layout.starts[feature]);
            let (bins, finder) = (cuts.bins(), cuts.finder());
            for block in blocks {
                block.chunk.column(feature, block.rows.clone(), |row, value| {
                    let bin = finder.bin(value);
                    if bin < bins {
                        visit(block.first + row - block.rows.start, start + bin as u32);
                    }
                });
            }
        }
    };
    each(&mut |row, _| starts[row + 1] += 1);
    for row in 0..rows {
        starts[row + 1] += starts[row];
    }
    if starts[rows] > u64::from(u32::MAX) {
        return Err(Error::Input(format!(
            "{} sparse values on one rank; use more ranks",
            starts[rows]
        )));
    }
    let mut entries = vec![0u32; starts[rows] as usize];
    let mut next: Vec<u32> = starts.iter().map(|start| *start as u32).collect();
    // Features are visited in order, so slots increase within a row.
    each(&mut |row, slot| {
        entries[next[row] as usize] = slot;
        next[row] += 1;
    });
    Ok((starts.into_iter().map(|start| start as u32).collect(), entries))
}

/// Sparse values by column: starts, rows and bins.
fn sparse_columns(
    starts: &[u32],
    entries: &[u32],
    layout: &Layout,
) -> (Vec<u32>, Vec<u32>, Vec<u16>) {
    if starts.is_empty() {
        return (Vec::new(), Vec::new(), Vec::new());
    }
    let mut feature_of = vec![0u32; layout.slots()];
    for feature in 0..layout.starts.len() {
        feature_of[layout.range(feature)].fill(feature as u32);
    }
    let mut firsts = vec![0u32; layout.starts.len() + 1];
    entries.iter().for_each(|slot| firsts[feature_of[*slot as usize] as usize + 1] += 1);
    for feature in 0..layout.starts.len() {
        firsts[feature + 1] += firsts[feature];
    }
    let (mut rows, mut bins) = (vec![0; entries.len()], vec![0; entries.len()]);
    let mut next = firsts.clone();
    for row in 0..starts.len() - 1 {
        for slot in &entries[starts[row] as usize..starts[row + 1] as usize] {
            let feature = feature_of[*slot as usize] as usize;
            let at = next[feature] as usize;
            rows[at] = row as u32;
            bins[at] = (*slot - layout.starts[feature]) as u16;
            next[feature] += 1;
        }
    }
    (firsts, rows, bins)
}

/// First row of each group, and the end.
fn group_starts(groups: Option<&[u64]>) -> Result<Vec<u32>> {
    let Some(groups) = groups else { return Ok(Vec::new()) };
    let mut starts = vec![0];
    let mut seen = std::collections::HashSet::new();
    for row in 1..=groups.len() {
        if row == groups.len() || groups[row] != groups[row - 1] {
            if !seen.insert(groups[row - 1]) {
                return Err(Error::Input(format!(
                    "the rows of a group are not consecutive (row {row}); sort the data by group"
                )));
            }
            starts.push(row as u32);
        }
    }
    Ok(starts)
}
