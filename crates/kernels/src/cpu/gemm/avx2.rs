//! The f32 micro-kernel for AVX2: 6×16, which takes 12 of 16 registers for accumulators, 2 for `b`, 1 for `a`.

use super::panel::{Accumulator, KernelArgs};
use std::arch::x86_64::*;

/// # Safety
/// The processor has AVX2 and FMA; `a` is a packed panel (k, rows) with at most 6 rows, `b` is (k, 16) and the
/// accumulator (rows, 16).
pub unsafe fn multiply(args: &KernelArgs) {
    let KernelArgs { k, acc, .. } = *args;
    let (a, b) = (args.a.start.cast(), args.b.cast());
    // SAFETY: the caller's promise.
    unsafe {
        match args.rows {
            1 => tile::<1>(k, a, b, acc),
            2 => tile::<2>(k, a, b, acc),
            3 => tile::<3>(k, a, b, acc),
            4 => tile::<4>(k, a, b, acc),
            5 => tile::<5>(k, a, b, acc),
            6 => tile::<6>(k, a, b, acc),
            _ => unreachable!("panels have 1 to 6 rows"),
        }
    }
}

/// # Safety
/// As `multiply`.
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const ROWS: usize>(k: usize, a: *const f32, b: *const f32, to: Accumulator) {
    // SAFETY: reads and writes stay within the panels promised to `multiply`.
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); 2]; ROWS];
        if to.accumulate {
            for (row, acc) in acc.iter_mut().enumerate() {
                *acc = [
                    _mm256_loadu_ps(to.start.add(row * to.stride)),
                    _mm256_loadu_ps(to.start.add(row * to.stride + 8)),
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
            _mm256_storeu_ps(to.start.add(row * to.stride), acc[0]);
            _mm256_storeu_ps(to.start.add(row * to.stride + 8), acc[1]);
        }
    }
}
