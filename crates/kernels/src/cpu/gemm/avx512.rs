//! The f32 micro-kernel for AVX-512: up to 13×32, which takes 26 of 32 registers for accumulators, 2 for `b` and
//! the others for `a`. Rows of `a` are read from a packed panel or in place.

use super::panel::{Accumulator, KernelArgs, PanelA, PanelRequest, PrefetchA};
use super::{Data, Operand};
use std::arch::asm;
use std::arch::x86_64::*;

/// Maximum bytes from one k to the next for a transposed `a` that is read in place. Twice as many are allowed for
/// narrow products: such a panel fills the sets of L2 unevenly, so it should not be read often.
const MAX_K_STRIDE: usize = 1024;
const NARROW_COLS: usize = 128;

/// Rows of f32 need no packing, unless their stride maps all of them to one cache set.
pub fn unpacked_a(from: &Operand<'_>, panel: PanelRequest) -> Option<PanelA> {
    let Data::F32(values) = from.data else { return None };
    if from.round_to_bf16 || panel.ks.is_empty() {
        return None;
    }
    let start = values[from.index(panel.rows.start, panel.ks.start)..].as_ptr().cast();
    let stride = 4 * from.stride;
    let max_k_stride = if panel.n <= NARROW_COLS { 2 * MAX_K_STRIDE } else { MAX_K_STRIDE };
    match from.k_contiguous {
        true if !stride.is_multiple_of(4096) => {
            Some(PanelA { start, row_stride: stride, k_stride: 4 })
        }
        false if stride <= max_k_stride => Some(PanelA { start, row_stride: 4, k_stride: stride }),
        _ => None,
    }
}

/// # Safety
/// The processor has AVX-512 F; `a` has at most 13 rows, `b` is (k, 32) and the accumulator (rows, 32).
pub unsafe fn multiply(args: &KernelArgs) {
    let KernelArgs { rows, k, a, b, prefetch, acc } = *args;
    macro_rules! by_rows {
        ($($rows:literal)*) => {
            match (rows, a.row_stride) {
                // SAFETY: the caller's promise.
                $(($rows, 0 | 4) => unsafe { adjacent_rows::<$rows>(k, a, prefetch, b.cast(), acc) },)*
                // SAFETY: the caller's promise.
                $(($rows, _) => unsafe { strided_rows::<$rows>(k, a, prefetch, b.cast(), acc) },)*
                _ => unreachable!("panels have 1 to 13 rows"),
            }
        };
    }
    by_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13)
}

/// One cache line is prefetched every so many k, and four tiles prefetch a panel. A burst of prefetches would
/// delay the loads that are needed now.
const PREFETCH_EVERY: usize = 4;

/// The rows of each k are adjacent: a packed panel, or a transposed `a`.
///
/// # Safety
/// As `multiply`.
#[target_feature(enable = "avx512f")]
unsafe fn adjacent_rows<const ROWS: usize>(
    k: usize,
    a: PanelA,
    prefetch: PrefetchA,
    mut b: *const f32,
    to: Accumulator,
) {
    // SAFETY: reads and writes stay within the panels promised to `multiply`.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; ROWS];
        let step = if a.row_stride == 0 { 4 * ROWS } else { a.k_stride };
        // The last row of the next panel at each k: the first rows are in the same cache line, or in one that
        // this panel has read.
        let offset = 4 * (ROWS - 1) + prefetch.tile * (k / PREFETCH_EVERY) * step;
        let next = prefetch.next.wrapping_add(offset);
        let prefetching = prefetch.tile < PREFETCH_EVERY;
        let mut a = a.start;
        for p in 0..k {
            if p % PREFETCH_EVERY == 0 {
                if prefetching {
                    let line = next.wrapping_add(p / PREFETCH_EVERY * step);
                    _mm_prefetch::<_MM_HINT_T1>(line.cast());
                }
                prefetch_output::<ROWS>(p, &to);
            }
            let (b0, b1) = (_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(16)));
            for (row, acc) in acc.iter_mut().enumerate() {
                let x = _mm512_set1_ps(*a.cast::<f32>().add(row));
                acc[0] = _mm512_fmadd_ps(x, b0, acc[0]);
                acc[1] = _mm512_fmadd_ps(x, b1, acc[1]);
            }
            (a, b) = (a.wrapping_add(step), b.add(32));
        }
        store(acc, &to);
    }
}

/// The elements of each row are contiguous along k.
///
/// # Safety
/// As `multiply`.
#[target_feature(enable = "avx512f")]
unsafe fn strided_rows<const ROWS: usize>(
    k: usize,
    a: PanelA,
    prefetch: PrefetchA,
    mut b: *const f32,
    to: Accumulator,
) {
    // SAFETY: reads and writes stay within the panels promised to `multiply`.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; ROWS];
        let stride = a.row_stride;
        // Five base pointers and a stride reach all rows: base, base + stride and base + 2·stride are addressing
        // modes.
        let mut bases: [_; 5] = std::array::from_fn(|i| a.start.wrapping_add(3 * i * stride));
        // Four rows of the next panel, line by line.
        let next = prefetch.next.wrapping_add(4 * prefetch.tile * stride);
        let prefetching = 4 * prefetch.tile < ROWS;
        for p in 0..k {
            if p % PREFETCH_EVERY == 0 {
                if prefetching {
                    let row = p / PREFETCH_EVERY % 4;
                    let line = next.wrapping_add(row * stride + p / 16 * 64);
                    _mm_prefetch::<_MM_HINT_T1>(line.cast());
                }
                prefetch_output::<ROWS>(p, &to);
            }
            let (b0, b1) = (_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(16)));
            b = b.add(32);
            for (row, acc) in acc.iter_mut().enumerate() {
                let x = bases[row / 3].wrapping_add(row % 3 * stride);
                let x = _mm512_set1_ps(*x.cast::<f32>());
                acc[0] = _mm512_fmadd_ps(x, b0, acc[0]);
                acc[1] = _mm512_fmadd_ps(x, b1, acc[1]);
            }
            for base in &mut bases {
                *base = base.wrapping_add(4);
            }
        }
        store(acc, &to);
    }
}

/// Prefetches one line of the tile's destination for writing; each row has two.
///
/// # Safety
/// As `multiply`.
#[inline(always)]
unsafe fn prefetch_output<const ROWS: usize>(p: usize, to: &Accumulator) {
    let at = p / PREFETCH_EVERY;
    if at < 2 * ROWS {
        let line = to.output.wrapping_add(at / 2 * to.output_stride + at % 2 * 64);
        // SAFETY: a prefetch may point anywhere, and every processor with AVX-512 has this instruction. The
        // intrinsic would not prefetch for writing.
        unsafe {
            asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly))
        };
    }
}

/// Stores the accumulators, adding to the stored values if asked to. Inlined into the loops above: a call would
/// spill the registers.
///
/// # Safety
/// As `multiply`.
#[inline(always)]
unsafe fn store<const ROWS: usize>(mut acc: [[__m512; 2]; ROWS], to: &Accumulator) {
    for (row, acc) in acc.iter_mut().enumerate() {
        // SAFETY: within the accumulator.
        unsafe {
            let line = to.start.add(row * to.stride);
            if to.accumulate {
                acc[0] = _mm512_add_ps(_mm512_loadu_ps(line), acc[0]);
                acc[1] = _mm512_add_ps(_mm512_loadu_ps(line.add(16)), acc[1]);
            }
            _mm512_storeu_ps(line, acc[0]);
            _mm512_storeu_ps(line.add(16), acc[1]);
        }
    }
}
