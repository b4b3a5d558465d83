//! Rows of a table by token id, with learned positions added where a model has them; backward adds rows
//! into the table's gradient in the order of the tokens.

use super::Cpu;
use super::partition::{by_rows, grain_rows, parallel_for};
use super::simd::multiversion;
use crate::{Float, PositionRange, VocabShard};
use std::ops::Range;

impl VocabShard {
    /// The table's row for `id`; none when another rank holds it.
    fn row(self, id: u32, rows: usize) -> Option<usize> {
        assert!(
            (id as usize) < self.vocab,
            "token id {id} is beyond the vocabulary of {}",
            self.vocab
        );
        (id as usize).checked_sub(self.first).filter(|row| *row < rows)
    }
}

impl PositionRange {
    fn of(self, row: usize) -> usize {
        self.start + row % self.len
    }
}

/// `out[r] = table[ids[r]]`, plus `positions[place of r]`: (n, dim). A row that this table does not hold is
/// zero before its position, so that the ranks' outputs add up; give the positions to one of them.
///
/// # Panics
/// On an id beyond the vocabulary, or a position beyond the table.
pub fn forward<E: Float>(
    cpu: &Cpu,
    ids: &[u32],
    table: &[E],
    held: VocabShard,
    positions: Option<(&[E], PositionRange)>,
    out: &mut [E],
) {
    let Some(dim) = out.len().checked_div(ids.len()) else { return };
    assert!(
        out.len() == ids.len() * dim && dim > 0,
        "{} tokens, {} elements",
        ids.len(),
        out.len()
    );
    assert!(
        table.len().is_multiple_of(dim),
        "a table of {} elements has no rows of {dim}",
        table.len()
    );
    parallel_for(&cpu.team, ids.len(), grain_rows(dim), by_rows(out, dim), |tokens, out| {
        for (r, out) in tokens.zip(out.chunks_exact_mut(dim)) {
            match held.row(ids[r], table.len() / dim) {
                Some(row) => out.copy_from_slice(&table[row * dim..][..dim]),
                None => out.fill(E::default()),
            }
            if let Some((table, place)) = positions {
                add_row(cpu.level, &table[position(table.len(), dim, place.of(r))], out);
            }
        }
    });
}

/// `dtable[ids[r]] += dy[r]` for every row the table holds; it is cleared before, unless `accumulate`.
/// Members share the columns, so tokens of one id are added in the order of their rows.
pub fn backward<E: Float>(
    cpu: &Cpu,
    ids: &[u32],
    dy: &[E],
    held: VocabShard,
    dtable: &mut [f32],
    accumulate: bool,
) {
    if !accumulate {
        super::elementwise::fill(cpu, dtable, 0.0);
    }
    let Some(dim) = dy.len().checked_div(ids.len()) else { return };
    assert!(dy.len() == ids.len() * dim && dim > 0, "{} tokens, {} elements", ids.len(), dy.len());
    assert!(
        dtable.len().is_multiple_of(dim),
        "a table of {} elements has no rows of {dim}",
        dtable.len()
    );
    let rows = dtable.len() / dim;
    by_columns(cpu, dim, dtable, |table, columns| {
        for (&id, dy) in ids.iter().zip(dy.chunks_exact(dim)) {
            if let Some(row) = held.row(id, rows) {
                add_wide(cpu.level, &dy[columns.clone()], table.part(row, dim, columns.clone()));
            }
        }
    });
}

/// `dpositions[place of r] += dy[r]`, in the order of the rows; cleared before, unless `accumulate`.
pub fn positions_backward<E: Float>(
    cpu: &Cpu,
    dy: &[E],
    dim: usize,
    place: PositionRange,
    dpositions: &mut [f32],
    accumulate: bool,
) {
    if !accumulate {
        super::elementwise::fill(cpu, dpositions, 0.0);
    }
    let len = dpositions.len();
    by_columns(cpu, dim, dpositions, |table, columns| {
        for (r, dy) in dy.chunks_exact(dim).enumerate() {
            let at = place.of(r);
            position(len, dim, at);
            add_wide(cpu.level, &dy[columns.clone()], table.part(at, dim, columns.clone()));
        }
    });
}

/// Where a position's row lies in the table.
fn position(len: usize, dim: usize, at: usize) -> Range<usize> {
    assert!((at + 1) * dim <= len, "position {at} is beyond the table's {}", len / dim);
    at * dim..(at + 1) * dim
}

/// A table that members write at once, each its own columns.
struct Columns(*mut f32);

// SAFETY: members take disjoint columns through `part`.
unsafe impl Sync for Columns {}

impl Columns {
    #[allow(clippy::mut_from_ref, reason = "the pointer is the table's; see by_columns")]
    fn part(&self, row: usize, dim: usize, columns: Range<usize>) -> &mut [f32] {
        // SAFETY: `by_columns` gives each member columns of its own, callers have checked the row, and a
        // member lets go of one part before it takes the next.
        unsafe {
            std::slice::from_raw_parts_mut(self.0.add(row * dim + columns.start), columns.len())
        }
    }
}

/// Deals out a table's columns, a cache line's worth at the least.
fn by_columns(
    cpu: &Cpu,
    dim: usize,
    table: &mut [f32],
    work: impl Fn(&Columns, Range<usize>) + Sync,
) {
    let table = Columns(table.as_mut_ptr());
    cpu.team.split(dim, 16, &|columns| work(&table, columns));
}

multiversion! {
    fn add_row<I, E: Float>(from: &[E], to: &mut [E]) {
        let n = to.len();
        let from = &from[..n];
        for j in 0..n {
            to[j] = E::round_from(to[j].as_f32() + from[j].as_f32());
        }
    }

    fn add_wide<I, E: Float>(from: &[E], to: &mut [f32]) {
        let n = to.len();
        let from = &from[..n];
        for j in 0..n {
            to[j] += from[j].as_f32();
        }
    }
}
