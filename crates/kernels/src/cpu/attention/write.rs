//! Sums of gradients to where they belong, over or onto what is there, rounded to what is stored there.

use super::pack;
use super::rows::Reach;
use super::unit::Unit;
use crate::Float;
use crate::cpu::vector::{AHEAD, Job, Vector, soon};
use std::ops::Range;

/// Rows of keys' gradients to where they belong.
pub(super) struct Write<E> {
    /// Rows `step` apart.
    pub from: *const f32,
    pub step: usize,
    pub to: Reach<E>,
    pub tokens: Range<usize>,
    pub column: usize,
    pub dim: usize,
    pub factor: f32,
    /// To what is there, instead of over it.
    pub add: bool,
}

impl<E: Float> Job for Write<E> {
    /// # Safety
    /// The rows are inside what `to` was checked for, and this member's.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        for (i, token) in self.tokens.enumerate() {
            soon(self.to.at(token + AHEAD, self.column), self.dim);
            let (from, to) =
                (self.from.wrapping_add(i * self.step), self.to.at(token, self.column));
            // SAFETY: as above.
            unsafe { store(from, self.dim, self.factor, to, self.add) };
        }
    }
}

/// Rows of queries' gradients to where they belong.
pub(super) struct WriteQueries<'a, E> {
    /// Rows `step` apart.
    pub from: *const f32,
    pub step: usize,
    pub to: Reach<E>,
    pub unit: Unit<'a>,
    pub rows: Range<usize>,
    pub factor: f32,
    /// To what is there, instead of over it.
    pub add: bool,
}

impl<E: Float> Job for WriteQueries<'_, E> {
    /// # Safety
    /// The rows are inside what `to` was checked for, and this member's.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        let dim = self.unit.shape.head_dim;
        for (lane, row) in self.rows.enumerate() {
            let (place, next) = (self.unit.place(row), self.unit.place(row + AHEAD));
            soon(self.to.at(next.token, next.column), dim);
            let (from, to) =
                (self.from.wrapping_add(lane * self.step), self.to.at(place.token, place.column));
            // SAFETY: as above.
            unsafe { store(from, dim, self.factor, to, self.add) };
        }
    }
}

#[inline(always)]
unsafe fn store<E: Float>(from: *const f32, dim: usize, factor: f32, to: *mut E, add: bool) {
    // SAFETY: the caller vouches for `dim` elements on both sides.
    unsafe {
        match add {
            false => pack::narrow(from, dim, factor, to),
            true => pack::add(from, dim, factor, to),
        }
    }
}
