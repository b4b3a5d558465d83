//! Stores gradients in their type, or adds them to the stored ones.

use super::head_group::HeadGroup;
use super::pack;
use super::rows::RawRows;
use crate::Float;
use crate::cpu::vector::{PREFETCH_ROWS, Vector, WithSimd, prefetch};
use std::ops::Range;

/// Stores gradients of keys or values.
pub(super) struct StoreKeyGrads<E> {
    /// Rows, `row_stride` elements apart.
    pub from: *const f32,
    pub row_stride: usize,
    pub to: RawRows<E>,
    pub tokens: Range<usize>,
    pub column: usize,
    pub dim: usize,
    pub factor: f32,
    /// Add to the stored gradients.
    pub accumulate: bool,
}

impl<E: Float> WithSimd for StoreKeyGrads<E> {
    /// # Safety
    /// The rows are within the checked range of `to`, and no other thread writes them.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        for (i, token) in self.tokens.enumerate() {
            prefetch(self.to.at(token + PREFETCH_ROWS, self.column), self.dim);
            let (from, to) =
                (self.from.wrapping_add(i * self.row_stride), self.to.at(token, self.column));
            // SAFETY: as above.
            unsafe { store(from, self.dim, self.factor, to, self.accumulate) };
        }
    }
}

/// Stores gradients of queries.
pub(super) struct StoreQueryGrads<'a, E> {
    /// Rows, `row_stride` elements apart.
    pub from: *const f32,
    pub row_stride: usize,
    pub to: RawRows<E>,
    pub group: HeadGroup<'a>,
    pub rows: Range<usize>,
    pub factor: f32,
    /// Add to the stored gradients.
    pub accumulate: bool,
}

impl<E: Float> WithSimd for StoreQueryGrads<'_, E> {
    /// # Safety
    /// The rows are within the checked range of `to`, and no other thread writes them.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        let dim = self.group.shape.head_dim;
        for (lane, row) in self.rows.enumerate() {
            let (place, next) = (self.group.place(row), self.group.place(row + PREFETCH_ROWS));
            prefetch(self.to.at(next.token, next.column), dim);
            let (from, to) = (
                self.from.wrapping_add(lane * self.row_stride),
                self.to.at(place.token, place.column),
            );
            // SAFETY: as above.
            unsafe { store(from, dim, self.factor, to, self.accumulate) };
        }
    }
}

#[inline(always)]
unsafe fn store<E: Float>(from: *const f32, dim: usize, factor: f32, to: *mut E, accumulate: bool) {
    // SAFETY: the caller guarantees `dim` elements on both sides.
    unsafe {
        match accumulate {
            false => pack::store_scaled(from, dim, factor, to),
            true => pack::add_scaled(from, dim, factor, to),
        }
    }
}
