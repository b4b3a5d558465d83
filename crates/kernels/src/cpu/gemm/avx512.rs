//! The f32 inner loop for AVX-512: 14×32, which is 28 of 32 registers for sums, 2 for `b`, 1 for `a`.

use super::kernel::{Rows, Sums};
use std::arch::x86_64::*;

/// # Safety
/// The processor has AVX-512 F; `a` is (k, rows) with at most 14 rows, `b` (k, 32) and `sums` of (rows, 32).
pub unsafe fn multiply(rows: usize, k: usize, a: Rows, b: *const u8, sums: Sums) {
    let (a, b) = (a.start.cast(), b.cast());
    macro_rules! by_rows {
        ($($n:literal)*) => {
            match rows {
                // SAFETY: the caller's promise, passed on.
                $($n => unsafe { tile::<$n>(k, a, b, sums) },)*
                _ => unreachable!("panels have 1 to 14 rows"),
            }
        };
    }
    by_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14)
}

/// # Safety
/// As `multiply`.
#[target_feature(enable = "avx512f")]
unsafe fn tile<const ROWS: usize>(k: usize, a: *const f32, b: *const f32, sums: Sums) {
    // SAFETY: reads and writes stay in the panels that `multiply` was promised.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; ROWS];
        if sums.resume {
            for (row, acc) in acc.iter_mut().enumerate() {
                *acc = [
                    _mm512_loadu_ps(sums.start.add(row * sums.stride)),
                    _mm512_loadu_ps(sums.start.add(row * sums.stride + 16)),
                ];
            }
        }
        for p in 0..k {
            let (b0, b1) = (_mm512_loadu_ps(b.add(p * 32)), _mm512_loadu_ps(b.add(p * 32 + 16)));
            for (row, acc) in acc.iter_mut().enumerate() {
                let x = _mm512_set1_ps(*a.add(p * ROWS + row));
                acc[0] = _mm512_fmadd_ps(x, b0, acc[0]);
                acc[1] = _mm512_fmadd_ps(x, b1, acc[1]);
            }
        }
        for (row, acc) in acc.iter().enumerate() {
            _mm512_storeu_ps(sums.start.add(row * sums.stride), acc[0]);
            _mm512_storeu_ps(sums.start.add(row * sums.stride + 16), acc[1]);
        }
    }
}
