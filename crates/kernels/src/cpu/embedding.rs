//! Token embeddings with optional learned positions. The backward pass adds rows to the gradient of the table in the
//! order of the tokens.

use super::Cpu;
use super::partition::{by_rows, grain_rows, parallel_for};
use super::simd::multiversion;
use crate::{Float, PositionRange, VocabShard};
use std::ops::Range;

impl VocabShard {
    /// The table's row for `id`; `None` if it is in another shard.
    fn row(self, id: u32, rows: usize) -> Option<usize> {
        assert!(
            (id as usize) < self.vocab,
            "token id {id} is out of range: the vocabulary has {} tokens",
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

/// Token ids, and the shard of the vocabulary that the table holds.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    pub ids: &'a [u32],
    pub shard: VocabShard,
}

/// Gradient of a table.
pub struct TableGradient<'a> {
    pub table: &'a mut [f32],
    /// Add to the gradient instead of overwriting it.
    pub accumulate: bool,
}

/// `out[r] = table[ids[r]] + positions[position of r]`, (tokens, dim). A row in another shard is zero before its position
/// is added, so that the outputs of the shards can be summed; pass the positions to one of them.
///
/// # Panics
/// If an id exceeds the vocabulary, or a position exceeds its table.
pub fn forward<E: Float>(
    cpu: &Cpu,
    Tokens { ids, shard }: Tokens<'_>,
    table: &[E],
    positions: Option<(&[E], PositionRange)>,
    out: &mut [E],
) {
    let Some(dim) = out.len().checked_div(ids.len()) else { return };
    assert!(
        out.len() == ids.len() * dim && dim > 0,
        "{} elements are not a multiple of {} tokens",
        out.len(),
        ids.len()
    );
    assert!(
        table.len().is_multiple_of(dim),
        "a table of {} elements is not a multiple of dim={dim}",
        table.len()
    );
    parallel_for(&cpu.team, ids.len(), grain_rows(dim), by_rows(out, dim), |tokens, out| {
        for (r, out) in tokens.zip(out.chunks_exact_mut(dim)) {
            match shard.row(ids[r], table.len() / dim) {
                Some(row) => out.copy_from_slice(&table[row * dim..][..dim]),
                None => out.fill(E::default()),
            }
            if let Some((table, range)) = positions {
                add_row(cpu.level, &table[position(table.len(), dim, range.of(r))], out);
            }
        }
    });
}

/// `dtable[ids[r]] += dy[r]` for every row of the shard; the gradient is cleared first unless `accumulate`. Threads divide
/// the columns, so that tokens with the same id are added in order.
pub fn backward<E: Float>(
    cpu: &Cpu,
    Tokens { ids, shard }: Tokens<'_>,
    dy: &[E],
    TableGradient { table: dtable, accumulate }: TableGradient<'_>,
) {
    if !accumulate {
        super::elementwise::fill(cpu, dtable, 0.0);
    }
    let Some(dim) = dy.len().checked_div(ids.len()) else { return };
    assert!(
        dy.len() == ids.len() * dim && dim > 0,
        "{} elements are not a multiple of {} tokens",
        dy.len(),
        ids.len()
    );
    assert!(
        dtable.len().is_multiple_of(dim),
        "a table of {} elements is not a multiple of dim={dim}",
        dtable.len()
    );
    let rows = dtable.len() / dim;
    by_columns(cpu, dim, dtable, |table, columns| {
        for (&id, dy) in ids.iter().zip(dy.chunks_exact(dim)) {
            if let Some(row) = shard.row(id, rows) {
                add_to_f32(cpu.level, &dy[columns.clone()], table.part(row, dim, columns.clone()));
            }
        }
    });
}

/// `dpositions[position of r] += dy[r]`, in the order of the rows; the gradient is cleared first unless `accumulate`.
pub fn positions_backward<E: Float>(
    cpu: &Cpu,
    dy: &[E],
    dim: usize,
    range: PositionRange,
    TableGradient { table: dpositions, accumulate }: TableGradient<'_>,
) {
    if !accumulate {
        super::elementwise::fill(cpu, dpositions, 0.0);
    }
    let len = dpositions.len();
    by_columns(cpu, dim, dpositions, |table, columns| {
        for (r, dy) in dy.chunks_exact(dim).enumerate() {
            let at = range.of(r);
            position(len, dim, at);
            add_to_f32(cpu.level, &dy[columns.clone()], table.part(at, dim, columns.clone()));
        }
    });
}

/// Elements of the row of a position.
fn position(len: usize, dim: usize, at: usize) -> Range<usize> {
    assert!((at + 1) * dim <= len, "position {at} is out of range: the table has {}", len / dim);
    at * dim..(at + 1) * dim
}

/// A table in which each thread writes its own columns.
struct Columns(*mut f32);

// SAFETY: threads access disjoint columns through `part`.
unsafe impl Sync for Columns {}

impl Columns {
    #[allow(clippy::mut_from_ref, reason = "the pointer is the table's; see by_columns")]
    fn part(&self, row: usize, dim: usize, columns: Range<usize>) -> &mut [f32] {
        // SAFETY: `by_columns` gives each thread its own columns, callers check the row, and a thread drops one part
        // before it takes the next.
        unsafe {
            std::slice::from_raw_parts_mut(self.0.add(row * dim + columns.start), columns.len())
        }
    }
}

/// Divides the columns of a table among threads, in multiples of a cache line.
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

    fn add_to_f32<I, E: Float>(from: &[E], to: &mut [f32]) {
        let n = to.len();
        let from = &from[..n];
        for j in 0..n {
            to[j] += from[j].as_f32();
        }
    }
}
