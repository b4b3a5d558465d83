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

/// Sixteen lanes or sixteen k, by how they lie: the other direction runs through the vector.
type Square = [__m512i; SIDE];

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
        // SAFETY: the caller's promise, passed on.
        unsafe {
            let lane = lane + half * SIDE;
            let (mut low, mut high) = (square(strip, lane, k), square(strip, lane, k + SIDE));
            if strip.from.k_runs != SIDE_A {
                (low, high) = (transpose(low), transpose(high));
            }
            let to = to.add(half * SIDE);
            for (row, (low, high)) in low.into_iter().zip(high).enumerate() {
                let (low, high) = (split(low), split(high));
                for part in 0..PARTS {
                    to.add(part * 2 * SIDE + row).write(pairs(low[part], high[part]));
                }
            }
        }
    }
}

/// Sixteen lanes and sixteen k as they lie; what is past the strip is zero.
///
/// # Safety
/// As `pack_a`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn square(strip: &Strip<'_>, lane: usize, k: usize) -> Square {
    let Data::F32(values) = strip.from.data else { unreachable!("parts are of f32") };
    let left = |at: usize, end: usize| end.saturating_sub(at).min(SIDE);
    let (lanes, ks) = (left(lane, strip.lanes.end), left(k, strip.ks.end));
    let (rows, count) = if strip.from.k_runs { (lanes, ks) } else { (ks, lanes) };
    let mut square = [_mm512_setzero_si512(); SIDE];
    if rows == 0 || count == 0 {
        return square;
    }
    let stride = strip.from.stride;
    let ahead = if strip.from.k_runs { strip.width } else { DEEP };
    let mask = (u32::MAX >> (32 - count)) as u16;
    // SAFETY: only lanes and k of the strip are read; prefetches may point anywhere.
    unsafe {
        let from = values.as_ptr().add(strip.from.index(lane, k));
        for (i, row) in square.iter_mut().enumerate().take(rows) {
            let from = from.add(i * stride);
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(ahead * stride).cast());
            *row = _mm512_maskz_loadu_epi32(mask, from.cast());
        }
    }
    square
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
