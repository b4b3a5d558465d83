//! The product of two tiles, kept in registers while it grows. Everything is f32 and in the caches already.

#![allow(clippy::needless_range_loop)] // rows and columns of registers read best by number

use crate::cpu::vector::{Job, Vector};

/// What C held before.
#[derive(Clone, Copy)]
pub(super) enum Start {
    /// C = A B
    Fresh,
    /// C += A B
    Add,
    /// Row i of C is first multiplied with the i-th of these: C = diag(f) C + A B
    Scale(*const f32),
}

/// C (m, n) from A (m, k) and B (k, n). B and C have their columns side by side; A may lie either way.
pub(super) struct Product {
    pub m: usize,
    /// A multiple of 16.
    pub n: usize,
    pub k: usize,
    pub a: *const f32,
    /// From a row of A to the next, and from a column to the next.
    pub a_steps: (usize, usize),
    pub b: *const f32,
    pub b_step: usize,
    pub c: *mut f32,
    pub c_step: usize,
    pub start: Start,
}

impl Job for Product {
    /// # Safety
    /// The pointers reach as many elements as the sizes say, and C overlaps neither A nor B.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        let most = V::TALL.iter().rposition(|&tall| tall > 0).unwrap_or(1);
        let mut column = 0;
        while column < self.n {
            let across = ((self.n - column) / V::LANES).min(most);
            // SAFETY: the columns from `column` on for `across` vectors are inside B and C.
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
    /// N vectors of columns, from `column` on.
    #[inline(always)]
    unsafe fn columns<V: Vector, const N: usize>(&self, column: usize) {
        if N > 2 && V::TALL[N] == 0 {
            return; // not taken at this level, so not compiled either
        }
        let mut row = 0;
        // SAFETY: `row` plus the rows taken never pass `m`.
        unsafe {
            match V::TALL[N] {
                8 => row = self.rows::<V, 8, N>(row, column),
                6 => row = self.rows::<V, 6, N>(row, column),
                _ => {}
            }
            row = self.rows::<V, 4, N>(row, column);
            row = self.rows::<V, 2, N>(row, column);
            self.rows::<V, 1, N>(row, column);
        }
    }

    /// Blocks of M rows from `row` on, as long as there are enough; tells where it stopped.
    #[inline(always)]
    unsafe fn rows<V: Vector, const M: usize, const N: usize>(
        &self,
        mut row: usize,
        column: usize,
    ) -> usize {
        while row + M <= self.m {
            // SAFETY: the block lies inside A, B and C.
            unsafe { self.block::<V, M, N>(row, column) };
            row += M;
        }
        row
    }

    /// M rows and N vectors of C in registers, through all of k.
    #[inline(always)]
    unsafe fn block<V: Vector, const M: usize, const N: usize>(&self, row: usize, column: usize) {
        // SAFETY: all that is read and written lies inside A, B and C, by the caller's word.
        unsafe {
            let c = self.c.add(row * self.c_step + column);
            let mut sums = [[V::splat(0.0); N]; M];
            if !matches!(self.start, Start::Fresh) {
                for i in 0..M {
                    for j in 0..N {
                        sums[i][j] = V::load(c.add(i * self.c_step + j * V::LANES));
                    }
                }
            }
            if let Start::Scale(factors) = self.start {
                for i in 0..M {
                    let factor = V::splat(*factors.add(row + i));
                    for j in 0..N {
                        sums[i][j] = sums[i][j].mul(factor);
                    }
                }
            }
            let (row_step, k_step) = self.a_steps;
            let mut a = self.a.add(row * row_step);
            let mut b = self.b.add(column);
            for _ in 0..self.k {
                let mut across = [V::splat(0.0); N];
                for j in 0..N {
                    across[j] = V::load(b.add(j * V::LANES));
                }
                for i in 0..M {
                    let down = V::splat(*a.add(i * row_step));
                    for j in 0..N {
                        sums[i][j] = down.mul_add(across[j], sums[i][j]);
                    }
                }
                a = a.add(k_step);
                b = b.add(self.b_step);
            }
            for i in 0..M {
                for j in 0..N {
                    sums[i][j].store(c.add(i * self.c_step + j * V::LANES));
                }
            }
        }
    }
}
