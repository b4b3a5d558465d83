//! Rows of the nodes of a tree: one list in which the rows of a node are consecutive and increasing.

use std::ops::Range;

use lockstep_kernels::Team;

use crate::matrix::{Matrix, Storage};
use crate::par::{Disjoint, for_each, map, pieces};

/// Rows by node.
pub struct Partition {
    pub rows: Vec<u32>,
    /// A number per row, for passes that need one.
    pub scratch: Vec<u32>,
}

/// A node that is split: its positions, the feature, and for each bin whether it goes left (missing values at the end).
pub struct Cut {
    pub rows: Range<usize>,
    pub feature: usize,
    pub goes_left: Vec<bool>,
}

/// Rows that a thread moves at a time.
const GRAIN: usize = 1 << 15;

impl Partition {
    pub fn new(rows: usize) -> Partition {
        Partition { rows: (0..rows as u32).collect(), scratch: vec![0; rows] }
    }

    /// All rows in the root.
    pub fn reset(&mut self) {
        for (row, slot) in self.rows.iter_mut().enumerate() {
            *slot = row as u32;
        }
    }

    /// Splits nodes. Returns the position at which the right child of each starts.
    pub fn split(&mut self, team: &Team, matrix: &Matrix, cuts: &[Cut]) -> Vec<usize> {
        let mut tasks: Vec<(usize, Range<usize>)> = Vec::new();
        for (index, cut) in cuts.iter().enumerate() {
            let parts = pieces(cut.rows.len(), GRAIN, 4 * team.size());
            let at = |part: Range<usize>| cut.rows.start + part.start..cut.rows.start + part.end;
            tasks.extend(parts.into_iter().map(|part| (index, at(part))));
        }
        // Left rows from the start of each part, right rows from its end backward.
        let (rows, scratch) = (&self.rows, Disjoint::new(&mut self.scratch));
        let lefts = map(team, tasks.len(), &|task| {
            let (cut, range) = &tasks[task];
            // SAFETY: the parts are disjoint.
            let out = unsafe { scratch.range(range.clone()) };
            divide(matrix, &cuts[*cut], &rows[range.clone()], out)
        });
        let mut counts = vec![0; cuts.len()];
        tasks.iter().zip(&lefts).for_each(|((cut, _), left)| counts[*cut] += left);
        let starts: Vec<usize> =
            cuts.iter().zip(&counts).map(|(cut, left)| cut.rows.start + left).collect();
        let mut next: Vec<(usize, usize)> =
            cuts.iter().zip(&starts).map(|(cut, right)| (cut.rows.start, *right)).collect();
        let places: Vec<(usize, usize)> = tasks
            .iter()
            .zip(&lefts)
            .map(|((cut, range), left)| {
                let place = next[*cut];
                next[*cut] = (place.0 + left, place.1 + range.len() - left);
                place
            })
            .collect();
        let (scratch, target) = (&self.scratch, Disjoint::new(&mut self.rows));
        for_each(team, tasks.len(), &|task| {
            let ((_, range), left) = (&tasks[task], lefts[task]);
            let (to_left, to_right) = places[task];
            let right = range.len() - left;
            let from = &scratch[range.clone()];
            // SAFETY: every task has its own places.
            unsafe { target.range(to_left..to_left + left) }.copy_from_slice(&from[..left]);
            // SAFETY: every task has its own places.
            let out = unsafe { target.range(to_right..to_right + right) };
            out.iter_mut().zip(from[left..].iter().rev()).for_each(|(out, row)| *out = *row);
        });
        starts
    }
}

/// Writes the rows that go left from the start of `out`, the others from its end backward. Returns the number of the
/// former.
fn divide(matrix: &Matrix, cut: &Cut, rows: &[u32], out: &mut [u32]) -> usize {
    match matrix.layout.storage[cut.feature] {
        Storage::Bytes => {
            let mut table = [false; 256];
            for (slot, left) in table.iter_mut().zip(&cut.goes_left) {
                *slot = *left;
            }
            let column = matrix.dense_column(cut.feature);
            let bins = &matrix.byte_columns[column * matrix.rows..][..matrix.rows];
            divide_by(rows, out, |row| table[bins[row] as usize])
        }
        Storage::Words => {
            let (stride, column) = (matrix.word_features.len(), matrix.dense_column(cut.feature));
            divide_by(rows, out, |row| cut.goes_left[matrix.words[row * stride + column] as usize])
        }
        Storage::Sparse => {
            let missing = *cut.goes_left.last().expect("missing values have a direction");
            let (value_rows, bins) = matrix.sparse_values(cut.feature);
            let first = rows.first().copied().unwrap_or(0);
            let mut at = value_rows.partition_point(|row| *row < first);
            // Both lists are increasing.
            divide_by(rows, out, |row| {
                while value_rows.get(at).is_some_and(|other| (*other as usize) < row) {
                    at += 1;
                }
                match value_rows.get(at) {
                    Some(other) if *other as usize == row => cut.goes_left[bins[at] as usize],
                    _ => missing,
                }
            })
        }
    }
}

#[inline(always)]
fn divide_by(rows: &[u32], out: &mut [u32], mut goes_left: impl FnMut(usize) -> bool) -> usize {
    let (mut left, mut right) = (0, rows.len());
    for row in rows {
        let is_left = goes_left(*row as usize);
        // Both places are written, and only one of them is kept: there is no branch to mispredict.
        out[left] = *row;
        out[right - 1] = *row;
        left += usize::from(is_left);
        right -= usize::from(!is_left);
    }
    left
}
