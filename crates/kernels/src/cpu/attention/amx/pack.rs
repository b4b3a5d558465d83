//! Packs queries, keys and values as bf16 tiles for AMX: sizes are padded with zeros to whole registers, and the
//! right-hand side of a product is stored in pairs of rows.

use super::product::TILE;
use crate::cpu::attention::head_group::HeadGroup;
use crate::cpu::attention::rows::RawRows;
use crate::cpu::vector::{PREFETCH_ROWS, Vector, WithSimd, prefetch};
use std::ops::Range;

pub(super) fn padded(len: usize) -> usize {
    len.next_multiple_of(TILE)
}

/// Packs one head's rows of keys or values.
pub(super) struct PackKeys {
    pub from: RawRows<u16>,
    pub tokens: Range<usize>,
    pub column: usize,
    pub dim: usize,
    /// Keys per tile.
    pub tile: usize,
    /// Padded with zeros to a whole tile. (keys, padded(dim))
    pub row_major: *mut u16,
    /// If needed, the transpose of each tile, (tiles, padded(dim), tile), and a work buffer, (tile / 2, padded(dim)).
    pub transposed: Option<(*mut u16, *mut u32)>,
}

impl WithSimd for PackKeys {
    /// # Safety
    /// The rows are within the checked range of `from`, and the buffers can hold whole tiles.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        let (count, padded_dim) = (self.tokens.len(), padded(self.dim));
        // SAFETY: as above.
        unsafe {
            for (i, token) in self.tokens.enumerate() {
                prefetch(self.from.at(token + PREFETCH_ROWS, self.column), self.dim);
                copy(
                    self.from.at(token, self.column),
                    self.dim,
                    self.row_major.add(i * padded_dim),
                );
            }
            let whole = count.next_multiple_of(self.tile);
            self.row_major.add(count * padded_dim).write_bytes(0, (whole - count) * padded_dim);
            let Some((transposed, pairs)) = self.transposed else { return };
            for first in (0..whole).step_by(self.tile) {
                // A pair of keys is transposed like one 4-byte element.
                pair_rows(self.row_major.add(first * padded_dim), self.tile, padded_dim, pairs);
                let (from, to) =
                    (pairs.cast::<f32>(), transposed.add(first * padded_dim).cast::<f32>());
                for key in (0..self.tile / 2).step_by(V::LANES) {
                    for i in (0..padded_dim).step_by(V::LANES) {
                        let to = to.add(i * self.tile / 2 + key);
                        V::transpose(from.add(key * padded_dim + i), padded_dim, to, self.tile / 2);
                    }
                }
            }
        }
    }
}

/// Packs a block of queries, or of gradients of the output, in the three layouts that products need.
pub(super) struct PackQueries<'a> {
    pub group: HeadGroup<'a>,
    pub from: RawRows<u16>,
    pub rows: Range<usize>,
    /// Padded with zero rows. (padded(rows), padded(dim))
    pub row_major: *mut u16,
    /// Right-hand side of a sum over dims. (padded(dim) / 2, padded(rows))
    pub transposed: *mut u32,
    /// Right-hand side of a sum over rows, if needed. (padded(rows) / 2, padded(dim))
    pub pairs: Option<*mut u32>,
}

impl WithSimd for PackQueries<'_> {
    /// # Safety
    /// The rows are within the checked range of `from`, and the buffers can hold them.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        let dim = self.group.shape.head_dim;
        let (count, padded_dim, width) = (self.rows.len(), padded(dim), padded(self.rows.len()));
        // SAFETY: as above.
        unsafe {
            for (lane, row) in self.rows.enumerate() {
                let (place, next) = (self.group.place(row), self.group.place(row + PREFETCH_ROWS));
                prefetch(self.from.at(next.token, next.column), dim);
                copy(
                    self.from.at(place.token, place.column),
                    dim,
                    self.row_major.add(lane * padded_dim),
                );
            }
            self.row_major.add(count * padded_dim).write_bytes(0, (width - count) * padded_dim);
            // A pair of dims is transposed like one 4-byte element.
            let (from, to) = (self.row_major.cast::<f32>(), self.transposed.cast::<f32>());
            for lane in (0..width).step_by(V::LANES) {
                for i in (0..padded_dim / 2).step_by(V::LANES) {
                    V::transpose(
                        from.add(lane * padded_dim / 2 + i),
                        padded_dim / 2,
                        to.add(i * width + lane),
                        width,
                    );
                }
            }
            if let Some(pairs) = self.pairs {
                pair_rows(self.row_major, width, padded_dim, pairs);
            }
        }
    }
}

/// Transposes f32 sums (dim, rows) → (rows, dim), both padded.
pub(super) struct TransposeBack {
    pub dim: usize,
    pub rows: usize,
    pub from: *const f32,
    pub to: *mut f32,
}

impl WithSimd for TransposeBack {
    /// # Safety
    /// The pointers are valid for the given sizes.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        let (padded_dim, width) = (padded(self.dim), padded(self.rows));
        for i in (0..padded_dim).step_by(V::LANES) {
            for lane in (0..width).step_by(V::LANES) {
                // SAFETY: as above.
                unsafe {
                    V::transpose(
                        self.from.add(i * width + lane),
                        width,
                        self.to.add(lane * padded_dim + i),
                        padded_dim,
                    )
                };
            }
        }
    }
}

#[inline(always)]
unsafe fn copy(from: *const u16, dim: usize, to: *mut u16) {
    // SAFETY: the caller guarantees `dim` elements in `from` and `padded(dim)` in `to`.
    unsafe {
        to.copy_from_nonoverlapping(from, dim);
        to.add(dim).write_bytes(0, padded(dim) - dim);
    }
}

/// Interleaves pairs of rows: (rows, columns) → (rows / 2, columns) of two elements each.
#[inline(always)]
unsafe fn pair_rows(from: *const u16, rows: usize, columns: usize, to: *mut u32) {
    for row in (0..rows).step_by(2) {
        // SAFETY: the caller guarantees the sizes, and that `to` does not overlap `from`.
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
