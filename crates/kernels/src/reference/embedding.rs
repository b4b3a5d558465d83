//! Token and position embeddings.

use crate::{PositionRange, VocabShard};

pub fn forward(
    ids: &[u32],
    table: &[f64],
    dim: usize,
    shard: VocabShard,
    positions: Option<(&[f64], PositionRange)>,
) -> Vec<f64> {
    let mut out = vec![];
    for (r, &id) in ids.iter().enumerate() {
        for j in 0..dim {
            let token = match (id as usize).checked_sub(shard.first) {
                Some(row) if row < table.len() / dim => table[row * dim + j],
                _ => 0.0,
            };
            let position = positions
                .map_or(0.0, |(table, range)| table[(range.start + r % range.len) * dim + j]);
            out.push(token + position);
        }
    }
    out
}

/// Gradient of a table with `rows` rows.
pub fn backward(ids: &[u32], dy: &[f64], dim: usize, shard: VocabShard, rows: usize) -> Vec<f64> {
    let mut dtable = vec![0.0; rows * dim];
    for (r, &id) in ids.iter().enumerate() {
        if let Some(row) = (id as usize).checked_sub(shard.first).filter(|row| *row < rows) {
            (0..dim).for_each(|j| dtable[row * dim + j] += dy[r * dim + j]);
        }
    }
    dtable
}

/// Gradient of a table with `rows` positions.
pub fn positions_backward(dy: &[f64], dim: usize, range: PositionRange, rows: usize) -> Vec<f64> {
    let mut dpositions = vec![0.0; rows * dim];
    for (i, dy) in dy.iter().enumerate() {
        dpositions[(range.start + i / dim % range.len) * dim + i % dim] += dy;
    }
    dpositions
}
