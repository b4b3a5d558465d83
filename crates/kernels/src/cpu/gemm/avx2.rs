//! The f32 inner loop for AVX2: 6×16, which is 12 of 16 registers for sums, 2 for `b`, 1 for `a`.

use super::kernel::{Ahead, Rows, Sums};
use std::arch::x86_64::*;

/// # Safety
/// The processor has AVX2 and FMA; `a` is (k, rows) with at most 6 rows, `b` (k, 16) and `sums` of (rows, 16).
pub unsafe fn multiply(rows: usize, k: usize, a: Rows, _: Ahead, b: *const u8, sums: Sums) {
    let (a, b) = (a.start.cast(), b.cast());
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match rows {
            1 => tile::<1>(k, a, b, sums),
            2 => tile::<2>(k, a, b, sums),
            3 => tile::<3>(k, a, b, sums),
            4 => tile::<4>(k, a, b, sums),
            5 => tile::<5>(k, a, b, sums),
            6 => tile::<6>(k, a, b, sums),
            _ => unreachable!("panels have 1 to 6 rows"),
        }
    }
}

/// # Safety
/// As `multiply`.
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const ROWS: usize>(k: usize, a: *const f32, b: *const f32, sums: Sums) {
    // SAFETY: reads and writes stay in the panels that `multiply` was promised.
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); 2]; ROWS];
        if sums.resume {
            for (row, acc) in acc.iter_mut().enumerate() {
                *acc = [
                    _mm256_loadu_ps(sums.start.add(row * sums.stride)),
                    _mm256_loadu_ps(sums.start.add(row * sums.stride + 8)),
                ];
            }
        }
        for p in 0..k {
            let (b0, b1) = (_mm256_loadu_ps(b.add(p * 16)), _mm256_loadu_ps(b.add(p * 16 + 8)));
            for (row, acc) in acc.iter_mut().enumerate() {
                let x = _mm256_set1_ps(*a.add(p * ROWS + row));
                acc[0] = _mm256_fmadd_ps(x, b0, acc[0]);
                acc[1] = _mm256_fmadd_ps(x, b1, acc[1]);
            }
        }
        for (row, acc) in acc.iter().enumerate() {
            _mm256_storeu_ps(sums.start.add(row * sums.stride), acc[0]);
            _mm256_storeu_ps(sums.start.add(row * sums.stride + 8), acc[1]);
        }
    }
}
