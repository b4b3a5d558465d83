//! Rotary position embedding (RoFormer, Su et al. 2021), in place on the heads of a matrix of tokens. Pairs are
//! (i, i + head_dim / 2), as in the Llama models of Hugging Face. Knows nothing about attention.

use super::vector::{Vector, WithSimd, dispatch};
use super::{Cpu, Level};
use crate::{Float, RopeTable};

/// The position of each row.
#[derive(Clone, Copy, Debug)]
pub enum Positions<'a> {
    /// Sequences of `len` rows: row r is at position `start + r % len`.
    From { start: usize, len: usize },
    /// Sequences with listed positions: row r is at position `list[r % list.len()]`.
    List(&'a [u32]),
}

/// The heads to rotate: `heads` adjacent heads from column `offset` on. Adjacent queries and keys are rotated in one call.
#[derive(Clone, Copy, Debug)]
pub struct Rope<'a> {
    pub table: &'a RopeTable,
    pub rows: usize,
    pub heads: usize,
    pub offset: usize,
    pub stride: usize,
    pub positions: Positions<'a>,
}

impl Positions<'_> {
    fn of(&self, row: usize) -> usize {
        match self {
            Positions::From { start, len } => start + row % len,
            Positions::List(list) => list[row % list.len()] as usize,
        }
    }

    /// One more than the largest position of any row.
    fn end(&self, rows: usize) -> usize {
        match self {
            _ if rows == 0 => 0,
            Positions::From { start, len } => start + rows.min(*len),
            Positions::List(list) => {
                list.iter().take(rows).max().map_or(0, |last| *last as usize + 1)
            }
        }
    }
}

/// Rotates every pair by the angle of its position.
///
/// # Panics
/// If the matrix is too small, or a position exceeds the table.
pub fn forward<E: Float>(cpu: &Cpu, data: &mut [E], rope: &Rope<'_>) {
    rotate(cpu, data, rope, 1.0);
}

/// Rotates gradients back by the same angles: the transpose of a rotation is its inverse.
///
/// # Panics
/// As `forward`.
pub fn backward<E: Float>(cpu: &Cpu, data: &mut [E], rope: &Rope<'_>) {
    rotate(cpu, data, rope, -1.0);
}

fn rotate<E: Float>(cpu: &Cpu, data: &mut [E], rope: &Rope<'_>, sign: f32) {
    let Rope { table, rows, heads, offset, stride, positions } = *rope;
    let width = offset + heads * table.head_dim();
    let needed = if rows == 0 { 0 } else { (rows - 1) * stride + width };
    assert!(
        width <= stride && needed <= data.len(),
        "{rows} rows of {width} with stride {stride} need {needed} elements, not {}",
        data.len()
    );
    let end = positions.end(rows);
    assert!(
        end <= table.positions(),
        "position {} is out of range: the table has {} positions",
        end - 1,
        table.positions()
    );
    let start = Start(data.as_mut_ptr());
    let grain = (4096 / (heads * table.head_dim()).max(1)).max(1);
    cpu.team.split(rows, grain, &|range| {
        for row in range {
            // SAFETY: rows are disjoint, each belongs to one thread, and the last is within the matrix.
            unsafe { rotate_row(cpu.level, start.row(row * stride + offset), rope, row, sign) };
        }
    });
}

/// Start of the matrix, shared by all threads.
struct Start<E>(*mut E);

// SAFETY: threads access only their own rows.
unsafe impl<E: Send> Sync for Start<E> {}

impl<E> Start<E> {
    fn row(&self, at: usize) -> *mut E {
        self.0.wrapping_add(at)
    }
}

unsafe fn rotate_row<E: Float>(
    level: Level,
    row: *mut E,
    rope: &Rope<'_>,
    number: usize,
    sign: f32,
) {
    let (cos, sin) = rope.table.at(rope.positions.of(number));
    // SAFETY: the caller's promise.
    unsafe { dispatch(level, Rotate { row, heads: rope.heads, cos, sin, sign }) };
}

struct Rotate<'a, E> {
    row: *mut E, // (heads, head_dim)
    heads: usize,
    cos: &'a [f32], // (head_dim / 2)
    sin: &'a [f32], // (head_dim / 2)
    sign: f32,
}

impl<E: Float> WithSimd for Rotate<'_, E> {
    /// # Safety
    /// The row is valid, and no other thread accesses it.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        let half = self.cos.len();
        for head in 0..self.heads {
            // SAFETY: as above; the two halves are disjoint.
            let (low, high) = unsafe {
                let low = self.row.add(head * 2 * half);
                let high = low.add(half);
                (
                    std::slice::from_raw_parts_mut(low, half),
                    std::slice::from_raw_parts_mut(high, half),
                )
            };
            for (((x, y), cos), sin) in low.iter_mut().zip(high).zip(self.cos).zip(self.sin) {
                let (a, b, sin) = (x.as_f32(), y.as_f32(), sin * self.sign);
                *x = E::round_from(a * cos - b * sin);
                *y = E::round_from(b * cos + a * sin);
            }
        }
    }
}
