//! Products of f32 tiles in cache, with accumulators in registers.

#![allow(clippy::needless_range_loop)] // loops over arrays of registers are clearer with indices

use crate::cpu::vector::{Vector, WithSimd};

/// Initial value of C.
#[derive(Clone, Copy)]
pub(super) enum Init {
    /// C = A B
    Zero,
    /// C += A B
    Accumulate,
    /// C = diag(f) C + A B, with one factor per row.
    Rescale(*const f32),
}

/// C (m, n) from A (m, k) and B (k, n). B and C are row-major; A may have any strides.
pub(super) struct Product {
    pub m: usize,
    /// A multiple of 16.
    pub n: usize,
    pub k: usize,
    pub a: *const f32,
    /// Elements between rows of A, and between columns.
    pub a_strides: (usize, usize),
    pub b: *const f32,
    pub b_stride: usize,
    pub c: *mut f32,
    pub c_stride: usize,
    pub init: Init,
}

impl WithSimd for Product {
    /// # Safety
    /// The pointers are valid for the given sizes, and C overlaps neither A nor B.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        let max_across = V::MAX_ROWS.iter().rposition(|&rows| rows > 0).unwrap_or(1);
        let mut column = 0;
        while column < self.n {
            let across = ((self.n - column) / V::LANES).min(max_across);
            // SAFETY: `across` vectors of columns from `column` on are within B and C.
            unsafe {
                match across {
                    4 => self.columns::<V, 4>(column),
                    3 => self.columns::<V, 3>(column),
                    2 => self.columns::<V, 2>(column),
                    _ => self.columns::<V, 1>(column),
                }
            }
            column += across * V::LANES;
        }
    }
}

impl Product {
    /// Computes N vectors of columns, from `column` on.
    #[inline(always)]
    unsafe fn columns<V: Vector, const N: usize>(&self, column: usize) {
        if N > 2 && V::MAX_ROWS[N] == 0 {
            return; // never called at this level, so not compiled
        }
        let mut row = 0;
        // SAFETY: `row` plus the rows of a block never exceeds `m`.
        unsafe {
            match V::MAX_ROWS[N] {
                8 => row = self.rows::<V, 8, N>(row, column),
                6 => row = self.rows::<V, 6, N>(row, column),
                _ => {}
            }
            row = self.rows::<V, 4, N>(row, column);
            row = self.rows::<V, 2, N>(row, column);
            self.rows::<V, 1, N>(row, column);
        }
    }

    /// Computes blocks of M rows from `row` on while enough rows are left; returns the next row.
    #[inline(always)]
    unsafe fn rows<V: Vector, const M: usize, const N: usize>(
        &self,
        mut row: usize,
        column: usize,
    ) -> usize {
        while row + M <= self.m {
            // SAFETY: the block is within A, B and C.
            unsafe { self.block::<V, M, N>(row, column) };
            row += M;
        }
        row
    }

    /// Computes M rows and N vectors of C in registers.
    #[inline(always)]
    unsafe fn block<V: Vector, const M: usize, const N: usize>(&self, row: usize, column: usize) {
        // SAFETY: the caller guarantees that the block is within A, B and C.
        unsafe {
            let c = self.c.add(row * self.c_stride + column);
            let mut sums = [[V::splat(0.0); N]; M];
            if !matches!(self.init, Init::Zero) {
                for i in 0..M {
                    for j in 0..N {
                        sums[i][j] = V::load(c.add(i * self.c_stride + j * V::LANES));
                    }
                }
            }
            if let Init::Rescale(factors) = self.init {
                for i in 0..M {
                    let factor = V::splat(*factors.add(row + i));
                    for j in 0..N {
                        sums[i][j] = sums[i][j].mul(factor);
                    }
                }
            }
            let (row_stride, k_stride) = self.a_strides;
            let mut a = self.a.add(row * row_stride);
            let mut b = self.b.add(column);
            for _ in 0..self.k {
                let mut across = [V::splat(0.0); N];
                for j in 0..N {
                    across[j] = V::load(b.add(j * V::LANES));
                }
                for i in 0..M {
                    let down = V::splat(*a.add(i * row_stride));
                    for j in 0..N {
                        sums[i][j] = down.mul_add(across[j], sums[i][j]);
                    }
                }
                a = a.add(k_stride);
                b = b.add(self.b_stride);
            }
            for i in 0..M {
                for j in 0..N {
                    sums[i][j].store(c.add(i * self.c_stride + j * V::LANES));
                }
            }
        }
    }
}
