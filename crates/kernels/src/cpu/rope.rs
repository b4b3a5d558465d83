//! Rotary position embedding (RoFormer, Su et al. 2021), in place on the heads of a matrix of tokens. Pairs
//! are (i, i + head_dim / 2), as in the Llama models of Hugging Face. Knows nothing of attention.

use super::vector::{Vector, WithSimd, dispatch};
use super::{Cpu, Level};
use crate::{Float, RopeTable};

/// The position of each row.
#[derive(Clone, Copy, Debug)]
pub enum Positions<'a> {
    /// Sequences of `len` rows: row r stands at `start + r % len`.
    From { start: usize, len: usize },
    /// Sequences of as many rows as there are positions here: row r stands at `list[r % list.len()]`.
    List(&'a [u32]),
}

/// What to turn: in each row, `heads` heads side by side from `offset` on. Queries and keys that lie beside
/// each other are one call with the heads of both.
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

    /// One more than the last that any row has.
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

/// Turns every pair by its position's angle.
///
/// # Panics
/// When the matrix is smaller than `rope` says, or a position is beyond the table.
pub fn forward<E: Float>(cpu: &Cpu, data: &mut [E], rope: &Rope<'_>) {
    turn(cpu, data, rope, 1.0);
}

/// Turns gradients back by the same angles: a rotation's transpose is its inverse.
///
/// # Panics
/// As `forward`.
pub fn backward<E: Float>(cpu: &Cpu, data: &mut [E], rope: &Rope<'_>) {
    turn(cpu, data, rope, -1.0);
}

fn turn<E: Float>(cpu: &Cpu, data: &mut [E], rope: &Rope<'_>, sign: f32) {
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
        "position {} is beyond the table's {}; make it with more",
        end - 1,
        table.positions()
    );
    let start = Start(data.as_mut_ptr());
    let grain = (4096 / (heads * table.head_dim()).max(1)).max(1);
    cpu.team.split(rows, grain, &|mine| {
        for row in mine {
            // SAFETY: rows are apart, each is one member's, and the last ends inside the matrix.
            unsafe { turn_row(cpu.level, start.row(row * stride + offset), rope, row, sign) };
        }
    });
}

/// Where the matrix starts, for all members.
struct Start<E>(*mut E);

// SAFETY: the members reach rows of their own only.
unsafe impl<E: Send> Sync for Start<E> {}

impl<E> Start<E> {
    fn row(&self, at: usize) -> *mut E {
        self.0.wrapping_add(at)
    }
}

unsafe fn turn_row<E: Float>(level: Level, row: *mut E, rope: &Rope<'_>, number: usize, sign: f32) {
    let (cos, sin) = rope.table.at(rope.positions.of(number));
    // SAFETY: handed on.
    unsafe { dispatch(level, Turn { row, heads: rope.heads, cos, sin, sign }) };
}

struct Turn<'a, E> {
    row: *mut E, // (heads, head_dim)
    heads: usize,
    cos: &'a [f32], // (head_dim / 2)
    sin: &'a [f32], // (head_dim / 2)
    sign: f32,
}

impl<E: Float> WithSimd for Turn<'_, E> {
    /// # Safety
    /// The row is there and nobody else's.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        let half = self.cos.len();
        for head in 0..self.heads {
            // SAFETY: as above; the two halves are apart.
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
