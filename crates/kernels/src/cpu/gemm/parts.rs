//! Packing f32 into the bf16 tiles of `thirds`: each element as three bf16 whose sum it is. The tiles are those of
//! `pairs`, but that a pair is (k, k + 16): which k meet in a pair is nobody's affair as long as both sides agree,
//! and sixteen neighbours and the sixteen after them become pairs by a shift.

use super::Data;
use super::kernel::Strip;
use super::pairs::{DEEP, SIDE};
use super::transpose::transpose;
use std::arch::x86_64::*;

/// Of one element: the first has its upper eight bits, the second the next eight, the third the rest.
pub const PARTS: usize = 3;

/// Packs panels of 32 lanes; in a panel `[k / 32][part][lane / 16]` is a tile. What is not there is zero.
///
/// # Safety
/// The processor has AVX-512; the strip is of f32 and lies in its operand; there is room for whole tiles.
#[target_feature(enable = "avx512f")]
pub unsafe fn pack_a(strip: &Strip<'_>, panels: *mut u8) {
    // SAFETY: the caller's promise, passed on.
    unsafe { pack::<true>(strip, panels.cast()) }
}

/// # Safety
/// As `pack_a`.
#[target_feature(enable = "avx512f")]
pub unsafe fn pack_b(strip: &Strip<'_>, panels: *mut u8) {
    // SAFETY: the caller's promise, passed on.
    unsafe { pack::<false>(strip, panels.cast()) }
}

/// # Safety
/// As `pack_a`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn pack<const SIDE_A: bool>(strip: &Strip<'_>, panels: *mut __m512i) {
    let panel = |at: usize| panels.wrapping_add(at * strip.apart * PARTS / DEEP);
    let slab = |step: usize| 2 * PARTS * SIDE * step;
    let lanes = || strip.lanes.clone().step_by(strip.width).enumerate();
    let steps = || strip.ks.clone().step_by(DEEP).enumerate();
    // SAFETY: each tile is in its panel; the rest is the caller's promise.
    unsafe {
        if strip.from.k_runs {
            for (at, lane) in lanes() {
                for (step, k) in steps() {
                    tiles::<SIDE_A>(strip, lane, k, panel(at).add(slab(step)));
                }
            }
        } else {
            // A row of memory, which may be a page of its own, is visited once for all panels.
            for (step, k) in steps() {
                for (at, lane) in lanes() {
                    tiles::<SIDE_A>(strip, lane, k, panel(at).add(slab(step)));
                }
            }
        }
    }
}

/// The six tiles of 32 lanes and 32 k.
///
/// # Safety
/// As `pack_a`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn tiles<const SIDE_A: bool>(strip: &Strip<'_>, lane: usize, k: usize, to: *mut __m512i) {
    for half in 0..2 {
        let lane = lane + half * SIDE;
        let (low, high) = (Square::of(strip, lane, k), Square::of(strip, lane, k + SIDE));
        // SAFETY: the caller's promise, passed on.
        unsafe {
            let to = to.add(half * SIDE);
            if strip.from.k_runs == SIDE_A {
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

/// A row of the three tiles: sixteen elements, and those that are sixteen k further.
///
/// # Safety
/// As `pack_a`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn write(low: __m512i, high: __m512i, to: *mut __m512i) {
    for (part, (low, high)) in split(low).into_iter().zip(split(high)).enumerate() {
        // SAFETY: the caller's promise, passed on.
        unsafe { to.add(part * 2 * SIDE).write(pairs(low, high)) }
    }
}

/// Sixteen lanes and sixteen k as they lie.
struct Square {
    start: *const f32,
    stride: usize,
    /// What is past them, or past these of their elements, is zero.
    rows: usize,
    mask: u16,
    /// Rows from one of them to the one that will be read next at its place.
    next: usize,
}

impl Square {
    #[inline]
    fn of(strip: &Strip<'_>, lane: usize, k: usize) -> Square {
        let Data::F32(values) = strip.from.data else { unreachable!("parts are of f32") };
        let left = |at: usize, end: usize| end.saturating_sub(at).min(SIDE);
        let (lanes, ks) = (left(lane, strip.lanes.end), left(k, strip.ks.end));
        let k_runs = strip.from.k_runs;
        let (rows, count) = if k_runs { (lanes, ks) } else { (ks, lanes) };
        Square {
            start: values.as_ptr().wrapping_add(strip.from.index(lane, k)),
            stride: strip.from.stride,
            rows,
            mask: ((1u32 << count) - 1) as u16,
            next: if k_runs { strip.width } else { DEEP },
        }
    }

    /// # Safety
    /// As `pack_a`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn row(&self, row: usize) -> __m512i {
        let from = self.start.wrapping_add(row * self.stride);
        let mask = if row < self.rows { self.mask } else { 0 };
        // SAFETY: only lanes and k of the strip are read; prefetches may point anywhere.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(self.next * self.stride).cast());
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
            // SAFETY: the caller's promise, passed on.
            *row = unsafe { self.row(i) };
        }
        transpose(rows)
    }
}

/// The upper halves of both, as neighbours.
#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(low: __m512i, high: __m512i) -> __m512i {
    const FIRST_OR_BOTH_OTHERS: i32 = 0xf8;
    let upper = _mm512_set1_epi32(!0xffff);
    _mm512_ternarylogic_epi32::<FIRST_OR_BOTH_OTHERS>(_mm512_srli_epi32::<16>(low), high, upper)
}

/// Three bf16, in the upper halves of 32 bits, whose sum is the value: each is what is left, rounded to the
/// nearest, and what is left of that is exact in f32. The third needs no rounding, but of a value so small that it
/// is denormal the lower half is not empty.
#[inline]
#[target_feature(enable = "avx512f")]
fn split(bits: __m512i) -> [__m512i; PARTS] {
    let first = upper(bits);
    let left = less(bits, first);
    let second = upper(left);
    [first, second, less(left, second)]
}

/// To eight bits, ties away from zero.
#[inline]
#[target_feature(enable = "avx512f")]
fn upper(bits: __m512i) -> __m512i {
    let up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
    _mm512_and_si512(up, _mm512_set1_epi32(!0xffff))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn less(value: __m512i, part: __m512i) -> __m512i {
    let left = _mm512_sub_ps(_mm512_castsi512_ps(value), _mm512_castsi512_ps(part));
    _mm512_castps_si512(left)
}
