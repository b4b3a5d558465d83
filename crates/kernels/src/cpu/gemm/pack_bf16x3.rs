//! Packing f32 into bf16 tiles for `amx_bf16x3`: each element becomes three bf16 terms whose sum it is. The tiles are
//! those of `pack_bf16`, except that a pair is (k, k + 16). Both operands use the same pairs, so their order is
//! irrelevant, and this one needs only a shift.

use super::Data;
use super::pack_bf16::{SIDE, TILE_K};
use super::panel::PackJob;
use super::transpose::transpose;
use std::arch::x86_64::*;

/// bf16 terms per element: the upper eight bits of the significand, the next eight, and the rest.
pub const TERMS: usize = 3;

/// Packs panels of 32 rows or columns, as tiles `[k / 32][term][outer / 16]` padded with zeros.
///
/// # Safety
/// The processor has AVX-512; the job's range is of f32 and within its operand; `panels` can hold whole tiles.
#[target_feature(enable = "avx512f")]
pub unsafe fn pack_a(job: &PackJob<'_>, panels: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { pack::<true>(job, panels.cast()) }
}

/// # Safety
/// As `pack_a`.
#[target_feature(enable = "avx512f")]
pub unsafe fn pack_b(job: &PackJob<'_>, panels: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { pack::<false>(job, panels.cast()) }
}

/// # Safety
/// As `pack_a`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn pack<const IS_A: bool>(job: &PackJob<'_>, panels: *mut __m512i) {
    let panel = |index: usize| panels.wrapping_add(index * job.panel_stride * TERMS / TILE_K);
    let slab = |step: usize| 2 * TERMS * SIDE * step;
    let starts = || job.outer.clone().step_by(job.width).enumerate();
    let steps = || job.ks.clone().step_by(TILE_K).enumerate();
    // SAFETY: each tile is in its panel; the rest is the caller's promise.
    unsafe {
        if job.from.k_contiguous {
            for (index, outer) in starts() {
                for (step, k) in steps() {
                    tiles::<IS_A>(job, outer, k, panel(index).add(slab(step)));
                }
            }
        } else {
            // Each row of memory, possibly a page of its own, is visited once for all panels.
            for (step, k) in steps() {
                for (index, outer) in starts() {
                    tiles::<IS_A>(job, outer, k, panel(index).add(slab(step)));
                }
            }
        }
    }
}

/// Packs the six tiles of 32 rows or columns and 32 k.
///
/// # Safety
/// As `pack_a`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn tiles<const IS_A: bool>(job: &PackJob<'_>, outer: usize, k: usize, to: *mut __m512i) {
    for half in 0..2 {
        let outer = outer + half * SIDE;
        let (low, high) = (Square::new(job, outer, k), Square::new(job, outer, k + SIDE));
        // SAFETY: the caller's promise.
        unsafe {
            let to = to.add(half * SIDE);
            if job.from.k_contiguous == IS_A {
                for row in 0..SIDE {
                    write(low.row(row), high.row(row), to.add(row));
                }
            } else {
                let (low, high) = (low.columns(), high.columns());
                for row in 0..SIDE {
                    write(low[row], high[row], to.add(row));
                }
            }
        }
    }
}

/// Writes a row of the three tiles: sixteen elements paired with those at k + 16.
///
/// # Safety
/// As `pack_a`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn write(low: __m512i, high: __m512i, to: *mut __m512i) {
    for (term, (low, high)) in split(low).into_iter().zip(split(high)).enumerate() {
        // SAFETY: the caller's promise.
        unsafe { to.add(term * 2 * SIDE).write(pairs(low, high)) }
    }
}

/// 16×16 elements in memory order.
struct Square {
    start: *const f32,
    stride: usize,
    /// Rows past this count, and elements outside the mask, are zero.
    rows: usize,
    mask: u16,
    /// Prefetch distance in rows.
    ahead: usize,
}

impl Square {
    #[inline]
    fn new(job: &PackJob<'_>, outer: usize, k: usize) -> Square {
        let Data::F32(values) = job.from.data else { unreachable!("bf16x3 operands are f32") };
        let left = |at: usize, end: usize| end.saturating_sub(at).min(SIDE);
        let (outers, ks) = (left(outer, job.outer.end), left(k, job.ks.end));
        let k_contiguous = job.from.k_contiguous;
        let (rows, count) = if k_contiguous { (outers, ks) } else { (ks, outers) };
        Square {
            start: values.as_ptr().wrapping_add(job.from.index(outer, k)),
            stride: job.from.stride,
            rows,
            mask: ((1u32 << count) - 1) as u16,
            ahead: if k_contiguous { job.width } else { TILE_K },
        }
    }

    /// # Safety
    /// As `pack_a`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn row(&self, row: usize) -> __m512i {
        let from = self.start.wrapping_add(row * self.stride);
        let mask = if row < self.rows { self.mask } else { 0 };
        // SAFETY: only the job's range is read; prefetches may point anywhere.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(self.ahead * self.stride).cast());
            _mm512_maskz_loadu_epi32(mask, from.cast())
        }
    }

    /// # Safety
    /// As `pack_a`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn columns(&self) -> [__m512i; SIDE] {
        let mut rows = [_mm512_setzero_si512(); SIDE];
        for (i, row) in rows.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *row = unsafe { self.row(i) };
        }
        transpose(rows)
    }
}

/// The upper halves of both, as pairs.
#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(low: __m512i, high: __m512i) -> __m512i {
    const FIRST_OR_BOTH_OTHERS: i32 = 0xf8;
    let upper = _mm512_set1_epi32(!0xffff);
    _mm512_ternarylogic_epi32::<FIRST_OR_BOTH_OTHERS>(_mm512_srli_epi32::<16>(low), high, upper)
}

/// Splits f32 into three bf16 terms, in the upper halves of 32 bits, whose sum is the value. Each term is the
/// remainder rounded to nearest, and the next remainder is exact in f32. The third term needs no rounding; its lower
/// half is not zero only for values so small that it is denormal.
#[inline]
#[target_feature(enable = "avx512f")]
fn split(bits: __m512i) -> [__m512i; TERMS] {
    let first = round_to_upper(bits);
    let remainder = subtract(bits, first);
    let second = round_to_upper(remainder);
    [first, second, subtract(remainder, second)]
}

/// Rounds to eight significant bits, ties away from zero.
#[inline]
#[target_feature(enable = "avx512f")]
fn round_to_upper(bits: __m512i) -> __m512i {
    let up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
    _mm512_and_si512(up, _mm512_set1_epi32(!0xffff))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn subtract(value: __m512i, term: __m512i) -> __m512i {
    let difference = _mm512_sub_ps(_mm512_castsi512_ps(value), _mm512_castsi512_ps(term));
    _mm512_castps_si512(difference)
}
