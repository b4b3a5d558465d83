//! Packs queries, keys and values for the products: contiguous f32 rows, with dims padded to whole vectors.

use super::head_group::HeadGroup;
use super::rows::RawRows;
use crate::Float;
use crate::cpu::vector::{PREFETCH_ROWS, Vector, WithSimd, prefetch};
use std::ops::Range;

/// Padded sizes are multiples of this, the number of lanes of the widest vector.
pub(super) const PAD: usize = 16;

pub(super) fn padded(len: usize) -> usize {
    len.next_multiple_of(PAD)
}

/// Packs one head's rows of keys or values.
pub(super) struct PackKeys<E> {
    pub from: RawRows<E>,
    pub tokens: Range<usize>,
    pub column: usize,
    pub dim: usize,
    pub to: *mut f32, // (tokens, padded(dim))
}

impl<E: Float> WithSimd for PackKeys<E> {
    /// # Safety
    /// The rows are within the checked range of `from`, and `to` can hold them.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        for (i, token) in self.tokens.enumerate() {
            prefetch(self.from.at(token + PREFETCH_ROWS, self.column), self.dim);
            // SAFETY: as above.
            unsafe {
                copy_padded(
                    self.from.at(token, self.column),
                    self.dim,
                    self.to.add(i * padded(self.dim)),
                )
            };
        }
    }
}

/// Packs a block of queries, or of gradients of the output, in row-major order and transposed.
pub(super) struct PackQueries<'a, E> {
    pub group: HeadGroup<'a>,
    pub from: RawRows<E>,
    pub rows: Range<usize>,
    /// Padded with zero rows. (padded(rows), padded(dim))
    pub row_major: *mut f32,
    /// Multiplied by `factor`. (padded(dim), padded(rows))
    pub transposed: *mut f32,
    pub factor: f32,
}

impl<E: Float> WithSimd for PackQueries<'_, E> {
    /// # Safety
    /// The rows are within the checked range of `from`, and `row_major` and `transposed` can hold them.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        let dim = self.group.shape.head_dim;
        let (padded_dim, width) = (padded(dim), padded(self.rows.len()));
        // SAFETY: as above.
        unsafe {
            for (lane, row) in self.rows.clone().enumerate() {
                let (place, next) = (self.group.place(row), self.group.place(row + PREFETCH_ROWS));
                prefetch(self.from.at(next.token, next.column), dim);
                copy_padded(
                    self.from.at(place.token, place.column),
                    dim,
                    self.row_major.add(lane * padded_dim),
                );
            }
            self.row_major
                .add(self.rows.len() * padded_dim)
                .write_bytes(0, (width - self.rows.len()) * padded_dim);
            for lane in (0..width).step_by(V::LANES) {
                for i in (0..padded_dim).step_by(V::LANES) {
                    let from = self.row_major.add(lane * padded_dim + i);
                    V::transpose(from, padded_dim, self.transposed.add(i * width + lane), width);
                }
            }
            if self.factor != 1.0 {
                let factor = V::splat(self.factor);
                for i in (0..padded_dim * width).step_by(V::LANES) {
                    V::load(self.transposed.add(i)).mul(factor).store(self.transposed.add(i));
                }
            }
        }
    }
}

/// Stores a row times a factor, rounded to its type.
#[inline(always)]
pub(super) unsafe fn store_scaled<E: Float>(from: *const f32, dim: usize, factor: f32, to: *mut E) {
    for i in 0..dim {
        // SAFETY: the caller guarantees `dim` elements on both sides.
        unsafe { *to.add(i) = E::round_from(*from.add(i) * factor) };
    }
}

/// Adds a row times a factor to the stored one.
#[inline(always)]
pub(super) unsafe fn add_scaled<E: Float>(from: *const f32, dim: usize, factor: f32, to: *mut E) {
    for i in 0..dim {
        // SAFETY: the caller guarantees `dim` elements on both sides.
        unsafe { *to.add(i) = E::round_from((*to.add(i)).as_f32() + *from.add(i) * factor) };
    }
}

#[inline(always)]
unsafe fn copy_padded<E: Float>(from: *const E, dim: usize, to: *mut f32) {
    // SAFETY: the caller guarantees `dim` elements in `from` and `padded(dim)` in `to`.
    unsafe {
        for i in 0..dim {
            *to.add(i) = (*from.add(i)).as_f32();
        }
        for i in dim..padded(dim) {
            *to.add(i) = 0.0;
        }
    }
}
