//! The f32 inner loop for AVX-512: up to 13×32, which is 26 of 32 registers for sums, 2 for `b`, the others for
//! `a`. Rows of `a` are read from a packed panel, or as they lie.

use super::kernel::{Ahead, Rows, Sums};
use super::{Data, Operand};
use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

/// Rows that need no packing: f32, and not so far apart that all fall into one set of the cache.
pub fn in_place(
    from: &Operand<'_>,
    lanes: Range<usize>,
    _rows: usize,
    ks: Range<usize>,
) -> Option<Rows> {
    let Data::F32(values) = from.data else { return None };
    if from.rounded || ks.is_empty() {
        return None;
    }
    let start = values[from.index(lanes.start, ks.start)..].as_ptr().cast();
    let bytes = 4 * from.stride;
    match from.k_runs {
        true if !bytes.is_multiple_of(4096) => {
            Some(Rows { start, stride: bytes, step: 4, ahead: Ahead::default() })
        }
        false if bytes <= 1024 => {
            Some(Rows { start, stride: 4, step: bytes, ahead: Ahead::default() })
        }
        _ => None,
    }
}

/// # Safety
/// The processor has AVX-512 F; `a` is (k, rows) with at most 13 rows, `b` (k, 32) and `sums` of (rows, 32).
pub unsafe fn multiply(rows: usize, k: usize, a: Rows, b: *const u8, sums: Sums) {
    macro_rules! by_rows {
        ($($packed:literal)*, $($lying:literal)*) => {
            match (rows, a.stride) {
                // SAFETY: the caller's promise, passed on.
                $(($packed, 0) => unsafe { packed::<$packed>(k, a, b.cast(), sums) },)*
                (_, 0) => unreachable!("packed panels have 11 to 13 rows"),
                // SAFETY: the caller's promise, passed on.
                $(($lying, _) => unsafe { lying::<$lying>(k, a, b.cast(), sums) },)*
                _ => unreachable!("panels have 1 to 13 rows"),
            }
        };
    }
    // Packed panels are filled up with zeros, so that they have one of the kernel's heights.
    by_rows!(11 12 13, 1 2 3 4 5 6 7 8 9 10 11 12 13)
}

/// Every fourth step asks for one line of where the tile will be written, the first of each row and its
/// neighbour: it shall have come when the sums are done.
///
/// # Safety
/// As `multiply`.
#[inline(always)]
unsafe fn ask<const ROWS: usize>(p: usize, sums: &Sums) {
    let at = p / 4;
    if at < 2 * ROWS {
        let line = sums.place.wrapping_add(at / 2 * sums.place_stride + at % 2 * 64);
        // SAFETY: a prefetch reads nothing and may point anywhere; whoever has AVX-512 has this one. The
        // compiler's own would not ask for a line to write to.
        unsafe {
            asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly))
        };
    }
}

/// Stores the sums, on top of what is there or not.
///
/// # Safety
/// As `multiply`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn end<const ROWS: usize>(mut acc: [[__m512; 2]; ROWS], sums: Sums) {
    for (row, acc) in acc.iter_mut().enumerate() {
        // SAFETY: within the sums.
        unsafe {
            let line = sums.start.add(row * sums.stride);
            if sums.resume {
                acc[0] = _mm512_add_ps(_mm512_loadu_ps(line), acc[0]);
                acc[1] = _mm512_add_ps(_mm512_loadu_ps(line.add(16)), acc[1]);
            }
            _mm512_storeu_ps(line, acc[0]);
            _mm512_storeu_ps(line.add(16), acc[1]);
        }
    }
}

/// # Safety
/// As `multiply`, with `a` packed.
#[target_feature(enable = "avx512f")]
unsafe fn packed<const ROWS: usize>(k: usize, a: Rows, b: *const f32, sums: Sums) {
    // SAFETY: reads and writes stay in the panels that `multiply` was promised.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; ROWS];
        // The next panel begins where this one ends, or a line later. Its lines, one every fourth step.
        let next = a.start.wrapping_add(4 * ROWS * k + 16 * k * a.ahead.tile);
        let asking = 4 * a.ahead.tile < ROWS;
        let a = a.start.cast::<f32>();
        for p in 0..k {
            if p % 4 == 0 {
                if asking {
                    _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(16 * p).cast());
                }
                ask::<ROWS>(p, &sums);
            }
            let (b0, b1) = (_mm512_loadu_ps(b.add(p * 32)), _mm512_loadu_ps(b.add(p * 32 + 16)));
            for (row, acc) in acc.iter_mut().enumerate() {
                let x = _mm512_set1_ps(*a.add(p * ROWS + row));
                acc[0] = _mm512_fmadd_ps(x, b0, acc[0]);
                acc[1] = _mm512_fmadd_ps(x, b1, acc[1]);
            }
        }
        end(acc, sums);
    }
}

/// # Safety
/// As `multiply`, with `a` as it lies.
#[target_feature(enable = "avx512f")]
unsafe fn lying<const ROWS: usize>(k: usize, a: Rows, mut b: *const f32, sums: Sums) {
    // SAFETY: reads and writes stay in the panels that `multiply` was promised.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; ROWS];
        // Five pointers and a stride reach all rows: base, base + stride, base + 2·stride are addresses that
        // an instruction can form by itself.
        let mut bases: [_; 5] = std::array::from_fn(|i| a.start.wrapping_add(3 * i * a.stride));
        // The next panel's rows, four in each of the first tiles, a line every fourth step: they shall have come
        // when their turn does.
        let next = a.start.wrapping_add((ROWS + 4 * a.ahead.tile) * a.stride);
        let asking = 4 * a.ahead.tile < ROWS && a.step == 4;
        for p in 0..k {
            if p % 4 == 0 {
                if asking {
                    let line = next.wrapping_add(p / 4 % 4 * a.stride + p / 16 * 64);
                    _mm_prefetch::<_MM_HINT_T1>(line.cast());
                }
                ask::<ROWS>(p, &sums);
            }
            let (b0, b1) = (_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(16)));
            b = b.add(32);
            for (row, acc) in acc.iter_mut().enumerate() {
                let x = bases[row / 3].wrapping_add(row % 3 * a.stride);
                let x = _mm512_set1_ps(*x.cast::<f32>());
                acc[0] = _mm512_fmadd_ps(x, b0, acc[0]);
                acc[1] = _mm512_fmadd_ps(x, b1, acc[1]);
            }
            for base in &mut bases {
                *base = base.wrapping_add(a.step);
            }
        }
        end(acc, sums);
    }
}
