//! bf16 tiles as the matrix unit wants them: sizes padded with noughts to whole registers, and the right-hand
//! side of a product in pairs of rows.

use super::tiles::GRAIN;
use crate::cpu::attention::rows::Reach;
use crate::cpu::attention::unit::Unit;
use crate::cpu::vector::{AHEAD, Job, Vector, soon};
use std::ops::Range;

pub(super) fn padded(len: usize) -> usize {
    len.next_multiple_of(GRAIN)
}

/// One head's rows of keys or values.
pub(super) struct Keys {
    pub from: Reach<u16>,
    pub tokens: Range<usize>,
    pub column: usize,
    pub dim: usize,
    /// How many keys a tile has.
    pub tile: usize,
    /// With noughts up to a whole tile. (keys, padded(dim))
    pub straight: *mut u16,
    /// The same turned, tile by tile, if it is wanted: (tiles, padded(dim), tile). And room to do it in:
    /// (tile / 2, padded(dim)).
    pub turned: Option<(*mut u16, *mut u32)>,
}

impl Job for Keys {
    /// # Safety
    /// The rows are inside what `from` was checked for, and there is room for whole tiles.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        let (count, deep) = (self.tokens.len(), padded(self.dim));
        // SAFETY: as above.
        unsafe {
            for (i, token) in self.tokens.enumerate() {
                soon(self.from.at(token + AHEAD, self.column), self.dim);
                copy(self.from.at(token, self.column), self.dim, self.straight.add(i * deep));
            }
            let whole = count.next_multiple_of(self.tile);
            self.straight.add(count * deep).write_bytes(0, (whole - count) * deep);
            let Some((turned, paired)) = self.turned else { return };
            for first in (0..whole).step_by(self.tile) {
                // Two keys in a pair are one element of four bytes, which is turned as a number would be.
                pair(self.straight.add(first * deep), self.tile, deep, paired);
                let (from, to) = (paired.cast::<f32>(), turned.add(first * deep).cast::<f32>());
                for key in (0..self.tile / 2).step_by(V::LANES) {
                    for i in (0..deep).step_by(V::LANES) {
                        let to = to.add(i * self.tile / 2 + key);
                        V::turn(from.add(key * deep + i), deep, to, self.tile / 2);
                    }
                }
            }
        }
    }
}

/// A block of a unit's queries (or of their gradients), in the three ways that products take them.
pub(super) struct Queries<'a> {
    pub unit: Unit<'a>,
    pub from: Reach<u16>,
    pub rows: Range<usize>,
    /// With noughts beyond the last row. (padded(rows), padded(dim))
    pub straight: *mut u16,
    /// Right-hand side of a sum over dims. (padded(dim) / 2, padded(rows))
    pub turned: *mut u32,
    /// Right-hand side of a sum over rows, if it is wanted. (padded(rows) / 2, padded(dim))
    pub paired: Option<*mut u32>,
}

impl Job for Queries<'_> {
    /// # Safety
    /// The rows are inside what `from` was checked for, and there is room.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        let dim = self.unit.shape.head_dim;
        let (count, deep, wide) = (self.rows.len(), padded(dim), padded(self.rows.len()));
        // SAFETY: as above.
        unsafe {
            for (lane, row) in self.rows.enumerate() {
                let (place, next) = (self.unit.place(row), self.unit.place(row + AHEAD));
                soon(self.from.at(next.token, next.column), dim);
                copy(self.from.at(place.token, place.column), dim, self.straight.add(lane * deep));
            }
            self.straight.add(count * deep).write_bytes(0, (wide - count) * deep);
            // Two dims beside each other are one element of four bytes, which is turned as a number would be.
            let (from, to) = (self.straight.cast::<f32>(), self.turned.cast::<f32>());
            for lane in (0..wide).step_by(V::LANES) {
                for i in (0..deep / 2).step_by(V::LANES) {
                    V::turn(from.add(lane * deep / 2 + i), deep / 2, to.add(i * wide + lane), wide);
                }
            }
            if let Some(paired) = self.paired {
                pair(self.straight, wide, deep, paired);
            }
        }
    }
}

/// A square of f32 sums turned back into rows. (dim, rows) → (rows, dim), both padded
pub(super) struct Back {
    pub dim: usize,
    pub rows: usize,
    pub from: *const f32,
    pub to: *mut f32,
}

impl Job for Back {
    /// # Safety
    /// The pointers reach as many elements as the sizes say.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        let (deep, wide) = (padded(self.dim), padded(self.rows));
        for i in (0..deep).step_by(V::LANES) {
            for lane in (0..wide).step_by(V::LANES) {
                // SAFETY: as above.
                unsafe {
                    V::turn(
                        self.from.add(i * wide + lane),
                        wide,
                        self.to.add(lane * deep + i),
                        deep,
                    )
                };
            }
        }
    }
}

#[inline(always)]
unsafe fn copy(from: *const u16, dim: usize, to: *mut u16) {
    // SAFETY: the caller vouches for `dim` elements in `from`, and for as many padded in `to`.
    unsafe {
        to.copy_from_nonoverlapping(from, dim);
        to.add(dim).write_bytes(0, padded(dim) - dim);
    }
}

/// (rows, columns) → (rows / 2, columns) of two rows' elements each
#[inline(always)]
unsafe fn pair(from: *const u16, rows: usize, columns: usize, to: *mut u32) {
    for row in (0..rows).step_by(2) {
        // SAFETY: the caller vouches for the sizes, and that `to` is elsewhere.
        let (low, high, to) = unsafe {
            (
                std::slice::from_raw_parts(from.add(row * columns), columns),
                std::slice::from_raw_parts(from.add((row + 1) * columns), columns),
                std::slice::from_raw_parts_mut(to.add(row / 2 * columns), columns),
            )
        };
        for ((to, low), high) in to.iter_mut().zip(low).zip(high) {
            *to = u32::from(*low) | u32::from(*high) << 16;
        }
    }
}
