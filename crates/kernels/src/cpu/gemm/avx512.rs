//! The f32 inner loop for AVX-512: up to 13×32, which is 26 of 32 registers for sums, 2 for `b`, the others for
//! `a`. Rows of `a` are read from a packed panel, or as they lie.

use super::kernel::{Ahead, Lying, Rows, Sums};
use super::{Data, Operand};
use std::arch::asm;
use std::arch::x86_64::*;

/// Rows that lie side by side are read in place when it is at most so many bytes from one k to the next; or twice as
/// many where they meet few columns: a panel that fills the sets of L2 so unevenly should not be read often.
const SIDE_BY_SIDE: usize = 1024;
const FEW_COLS: usize = 128;

/// Rows that need no packing: f32, and not so far apart that all fall into one set of the cache.
pub fn in_place(from: &Operand<'_>, Lying { lanes, ks, cols, .. }: Lying) -> Option<Rows> {
    let Data::F32(values) = from.data else { return None };
    if from.rounded || ks.is_empty() {
        return None;
    }
    let start = values[from.index(lanes.start, ks.start)..].as_ptr().cast();
    let bytes = 4 * from.stride;
    match from.k_runs {
        true if !bytes.is_multiple_of(4096) => Some(Rows { start, stride: bytes, step: 4 }),
        false if bytes <= if cols <= FEW_COLS { 2 * SIDE_BY_SIDE } else { SIDE_BY_SIDE } => {
            Some(Rows { start, stride: 4, step: bytes })
        }
        _ => None,
    }
}

/// # Safety
/// The processor has AVX-512 F; `a` is (k, rows) with at most 13 rows, `b` (k, 32) and `sums` of (rows, 32).
pub unsafe fn multiply(rows: usize, k: usize, a: Rows, ahead: Ahead, b: *const u8, sums: Sums) {
    macro_rules! by_rows {
        ($($rows:literal)*) => {
            match (rows, a.stride) {
                // SAFETY: the caller's promise, passed on.
                $(($rows, 0 | 4) => unsafe { beside::<$rows>(k, a, ahead, b.cast(), sums) },)*
                // SAFETY: the caller's promise, passed on.
                $(($rows, _) => unsafe { apart::<$rows>(k, a, ahead, b.cast(), sums) },)*
                _ => unreachable!("panels have 1 to 13 rows"),
            }
        };
    }
    by_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13)
}

/// Every so many k a line is asked for, and four tiles ask for a panel: lines that come in a burst hold up those
/// that are needed now.
const ASK: usize = 4;

/// The rows of each k lie side by side, in a packed panel or by themselves.
///
/// # Safety
/// As `multiply`.
#[target_feature(enable = "avx512f")]
unsafe fn beside<const ROWS: usize>(
    k: usize,
    a: Rows,
    ahead: Ahead,
    mut b: *const f32,
    sums: Sums,
) {
    // SAFETY: reads and writes stay in the panels that `multiply` was promised.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; ROWS];
        let step = if a.stride == 0 { 4 * ROWS } else { a.step };
        // Of the next panel's rows at each k the last one: the first lie in the same line, or in one that this
        // panel has touched.
        let next = ahead.next.wrapping_add(4 * (ROWS - 1) + ahead.tile * (k / ASK) * step);
        let asking = ahead.tile < ASK;
        let mut a = a.start;
        for p in 0..k {
            if p % ASK == 0 {
                if asking {
                    _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(p / ASK * step).cast());
                }
                ask_place::<ROWS>(p, &sums);
            }
            let (b0, b1) = (_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(16)));
            for (row, acc) in acc.iter_mut().enumerate() {
                let x = _mm512_set1_ps(*a.cast::<f32>().add(row));
                acc[0] = _mm512_fmadd_ps(x, b0, acc[0]);
                acc[1] = _mm512_fmadd_ps(x, b1, acc[1]);
            }
            (a, b) = (a.wrapping_add(step), b.add(32));
        }
        end(acc, &sums);
    }
}

/// Each row lies along k.
///
/// # Safety
/// As `multiply`.
#[target_feature(enable = "avx512f")]
unsafe fn apart<const ROWS: usize>(k: usize, a: Rows, ahead: Ahead, mut b: *const f32, sums: Sums) {
    // SAFETY: reads and writes stay in the panels that `multiply` was promised.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; ROWS];
        // Five pointers and a stride reach all rows: base, base + stride, base + 2·stride are addresses that
        // an instruction can form by itself.
        let mut bases: [_; 5] = std::array::from_fn(|i| a.start.wrapping_add(3 * i * a.stride));
        // Four of the next panel's rows, line by line.
        let next = ahead.next.wrapping_add(4 * ahead.tile * a.stride);
        let asking = 4 * ahead.tile < ROWS;
        for p in 0..k {
            if p % ASK == 0 {
                if asking {
                    let line = next.wrapping_add(p / ASK % 4 * a.stride + p / 16 * 64);
                    _mm_prefetch::<_MM_HINT_T1>(line.cast());
                }
                ask_place::<ROWS>(p, &sums);
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
                *base = base.wrapping_add(4);
            }
        }
        end(acc, &sums);
    }
}

/// Asks for one line of where the tile will be written, the first of each row and its neighbour: it shall have
/// come when the sums are done.
///
/// # Safety
/// As `multiply`.
#[inline(always)]
unsafe fn ask_place<const ROWS: usize>(p: usize, sums: &Sums) {
    let at = p / ASK;
    if at < 2 * ROWS {
        let line = sums.place.wrapping_add(at / 2 * sums.place_stride + at % 2 * 64);
        // SAFETY: a prefetch reads nothing and may point anywhere; whoever has AVX-512 has this one. The
        // compiler's own would not ask for a line to write to.
        unsafe {
            asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly))
        };
    }
}

/// Stores the sums, on top of what is there or not. Part of the loops above: as a call of its own it would take
/// the sums through memory.
///
/// # Safety
/// As `multiply`.
#[inline(always)]
unsafe fn end<const ROWS: usize>(mut acc: [[__m512; 2]; ROWS], sums: &Sums) {
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
