//! Rows of a table by token id.

use crate::{PositionRange, VocabShard};

pub fn forward(
    ids: &[u32],
    table: &[f64],
    dim: usize,
    held: VocabShard,
    positions: Option<(&[f64], PositionRange)>,
) -> Vec<f64> {
    let mut out = vec![];
    for (r, &id) in ids.iter().enumerate() {
        for j in 0..dim {
            let token = match (id as usize).checked_sub(held.first) {
                Some(row) if row < table.len() / dim => table[row * dim + j],
                _ => 0.0,
            };
            let position = positions
                .map_or(0.0, |(table, place)| table[(place.start + r % place.len) * dim + j]);
            out.push(token + position);
        }
    }
    out
}

/// The gradient of a table of `rows`.
pub fn backward(ids: &[u32], dy: &[f64], dim: usize, held: VocabShard, rows: usize) -> Vec<f64> {
    let mut dtable = vec![0.0; rows * dim];
    for (r, &id) in ids.iter().enumerate() {
        if let Some(row) = (id as usize).checked_sub(held.first).filter(|row| *row < rows) {
            (0..dim).for_each(|j| dtable[row * dim + j] += dy[r * dim + j]);
        }
    }
    dtable
}

/// The gradient of a table of `rows` positions.
pub fn positions_backward(dy: &[f64], dim: usize, place: PositionRange, rows: usize) -> Vec<f64> {
    let mut dpositions = vec![0.0; rows * dim];
    for (i, dy) in dy.iter().enumerate() {
        dpositions[(place.start + i / dim % place.len) * dim + i % dim] += dy;
    }
    dpositions
}
