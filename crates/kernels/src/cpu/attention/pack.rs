//! Tiles as the products want them: f32, side by side, with dims padded to whole vectors.

use super::rows::Reach;
use super::unit::Unit;
use crate::Float;
use crate::cpu::vector::{AHEAD, Job, Vector, soon};
use std::ops::Range;

/// Every padded size is a multiple of this; the widest vector has as many lanes.
pub(super) const PAD: usize = 16;

pub(super) fn padded(len: usize) -> usize {
    len.next_multiple_of(PAD)
}

/// One head's rows of keys or values, one after another. (tokens, padded(dim))
pub(super) struct Keys<E> {
    pub from: Reach<E>,
    pub tokens: Range<usize>,
    pub column: usize,
    pub dim: usize,
    pub to: *mut f32,
}

impl<E: Float> Job for Keys<E> {
    /// # Safety
    /// The rows are inside what `from` was checked for, and `to` has room.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        for (i, token) in self.tokens.enumerate() {
            soon(self.from.at(token + AHEAD, self.column), self.dim);
            // SAFETY: as above.
            unsafe {
                widen(self.from.at(token, self.column), self.dim, self.to.add(i * padded(self.dim)))
            };
        }
    }
}

/// A block of a unit's queries (or of their gradients), both ways.
pub(super) struct Queries<'a, E> {
    pub unit: Unit<'a>,
    pub from: Reach<E>,
    pub rows: Range<usize>,
    /// With noughts beyond the last row. (padded(rows), padded(dim))
    pub straight: *mut f32,
    /// Times `factor`. (padded(dim), padded(rows))
    pub turned: *mut f32,
    pub factor: f32,
}

impl<E: Float> Job for Queries<'_, E> {
    /// # Safety
    /// The rows are inside what `from` was checked for, and `straight` and `turned` have room.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        let dim = self.unit.shape.head_dim;
        let (deep, wide) = (padded(dim), padded(self.rows.len()));
        // SAFETY: as above.
        unsafe {
            for (lane, row) in self.rows.clone().enumerate() {
                let (place, next) = (self.unit.place(row), self.unit.place(row + AHEAD));
                soon(self.from.at(next.token, next.column), dim);
                widen(self.from.at(place.token, place.column), dim, self.straight.add(lane * deep));
            }
            self.straight
                .add(self.rows.len() * deep)
                .write_bytes(0, (wide - self.rows.len()) * deep);
            for lane in (0..wide).step_by(V::LANES) {
                for i in (0..deep).step_by(V::LANES) {
                    let from = self.straight.add(lane * deep + i);
                    V::turn(from, deep, self.turned.add(i * wide + lane), wide);
                }
            }
            if self.factor != 1.0 {
                let factor = V::splat(self.factor);
                for i in (0..deep * wide).step_by(V::LANES) {
                    V::load(self.turned.add(i)).mul(factor).store(self.turned.add(i));
                }
            }
        }
    }
}

/// Rows of results times a factor, rounded to what is stored.
#[inline(always)]
pub(super) unsafe fn narrow<E: Float>(from: *const f32, dim: usize, factor: f32, to: *mut E) {
    for i in 0..dim {
        // SAFETY: the caller vouches for `dim` elements on both sides.
        unsafe { *to.add(i) = E::round_from(*from.add(i) * factor) };
    }
}

/// The same, added to what is stored.
#[inline(always)]
pub(super) unsafe fn add<E: Float>(from: *const f32, dim: usize, factor: f32, to: *mut E) {
    for i in 0..dim {
        // SAFETY: the caller vouches for `dim` elements on both sides.
        unsafe { *to.add(i) = E::round_from((*to.add(i)).as_f32() + *from.add(i) * factor) };
    }
}

#[inline(always)]
unsafe fn widen<E: Float>(from: *const E, dim: usize, to: *mut f32) {
    // SAFETY: the caller vouches for `dim` elements in `from`, and for as many padded in `to`.
    unsafe {
        for i in 0..dim {
            *to.add(i) = (*from.add(i)).as_f32();
        }
        for i in dim..padded(dim) {
            *to.add(i) = 0.0;
        }
    }
}
