//! Packing an operand into bf16 tiles for AMX. A tile is 1 KiB, sixteen rows of sixteen pairs; a pair is two
//! neighbours along k in 32 bits. On the side of `a` a row is a lane and its pairs run along k; on the side
//! of `b` a row is a pair of k, and its pairs run over lanes: each is the other one's transpose.

use super::Data;
use super::kernel::Strip;
use super::transpose::transpose;
use half::bf16;
use std::arch::x86_64::*;

/// Lanes, and pairs along k, of a tile.
pub const SIDE: usize = 16;
/// Elements along k of a tile.
pub const DEEP: usize = 32;
/// Elements of a tile.
pub const TILE: usize = SIDE * DEEP;

/// Rows of memory that are asked for ahead: strides of pages are beyond what the hardware foresees.
const AHEAD: usize = 16;

/// Packs panels of 32 lanes; in a panel `[k / 32][lane / 16]` is a tile. What is not there is zero.
///
/// # Safety
/// The processor has AVX-512; the strip lies in its operand; there is room for whole tiles.
pub unsafe fn pack_a(strip: &Strip<'_>, panels: *mut u8) {
    // SAFETY: the caller's promise, passed on.
    unsafe { pack::<true>(strip, panels.cast()) }
}

/// # Safety
/// As `pack_a`.
pub unsafe fn pack_b(strip: &Strip<'_>, panels: *mut u8) {
    // SAFETY: the caller's promise, passed on.
    unsafe { pack::<false>(strip, panels.cast()) }
}

/// # Safety
/// As `pack_a`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn pack<const SIDE_A: bool>(strip: &Strip<'_>, panels: *mut __m512i) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match (strip.from.data, strip.from.k_runs) {
            (Data::F32(values), true) => across::<f32, SIDE_A>(strip, values.as_ptr(), panels),
            (Data::F32(values), false) => along::<f32, SIDE_A>(strip, values.as_ptr(), panels),
            (Data::Bf16(values), true) => across::<bf16, SIDE_A>(strip, values.as_ptr(), panels),
            (Data::Bf16(values), false) => along::<bf16, SIDE_A>(strip, values.as_ptr(), panels),
        }
    }
}

/// Each lane lies along k, its pairs side by side: rows of `a` as they are.
///
/// # Safety
/// As `pack_a`.
#[inline(always)]
unsafe fn across<T: Halves, const SIDE_A: bool>(
    strip: &Strip<'_>,
    from: *const T,
    panels: *mut __m512i,
) {
    let stride = strip.from.stride;
    for (at, lane) in strip.lanes.clone().step_by(strip.width).enumerate() {
        let mut to = panels.wrapping_add(at * strip.apart / DEEP);
        for k in strip.ks.clone().step_by(DEEP) {
            let depth = (strip.ks.end - k).min(DEEP);
            for first in [lane, lane + SIDE] {
                let count = strip.lanes.end.saturating_sub(first).min(SIDE);
                // SAFETY: only lanes and k of the strip are read, and the panels have room for each tile.
                unsafe {
                    let mut rows = [_mm512_setzero_si512(); 16];
                    for (i, row) in rows.iter_mut().enumerate() {
                        if i < count {
                            let source = from.add((first + i) * stride + k);
                            // The next panel is packed when this one has been used; its lines may come now.
                            let next = source.wrapping_add(strip.width * stride);
                            _mm_prefetch::<_MM_HINT_T1>(next.cast());
                            *row = T::along(source, depth);
                        }
                    }
                    if !SIDE_A {
                        rows = transpose(rows);
                    }
                    rows.iter().enumerate().for_each(|(i, row)| to.add(i).write(*row));
                    to = to.add(SIDE);
                }
            }
        }
    }
}

/// Lanes lie side by side: two rows of memory are interleaved into rows of tiles of all panels at once, as `b`
/// wants them. For `a` the tiles are turned while they are warm.
///
/// # Safety
/// As `pack_a`.
#[inline(always)]
unsafe fn along<T: Halves, const SIDE_A: bool>(
    strip: &Strip<'_>,
    from: *const T,
    panels: *mut __m512i,
) {
    let stride = strip.from.stride;
    for (at, k) in strip.ks.clone().step_by(DEEP).enumerate() {
        let slabs = || {
            let lanes = strip.lanes.clone().step_by(strip.width).enumerate();
            let slab = panels.wrapping_add(at * 2 * SIDE);
            lanes.map(move |(at, lane)| (slab.wrapping_add(at * strip.apart / DEEP), lane))
        };
        for pair in 0..SIDE {
            let rows = strip.ks.end.saturating_sub(k + 2 * pair).min(2);
            let first = from.wrapping_add((k + 2 * pair) * stride);
            for (slab, lane) in slabs() {
                let count = (strip.lanes.end - lane).min(2 * SIDE);
                let count_of = |row| if row < rows { count } else { 0 };
                let source = first.wrapping_add(lane);
                // SAFETY: as many rows and lanes are read as the strip has; both tiles are in their panel.
                unsafe {
                    for line in (0..2 * SIDE).step_by(64 / size_of::<T>()) {
                        let ahead = source.wrapping_add(AHEAD * stride + line);
                        _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                        _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(stride).cast());
                    }
                    let low = (source, count_of(0));
                    let high = (source.wrapping_add(stride), count_of(1));
                    let [left, right] = T::interleaved(low, high);
                    slab.add(pair).write(left);
                    slab.add(SIDE + pair).write(right);
                }
            }
        }
        if SIDE_A {
            for (slab, _) in slabs() {
                for tile in [slab, slab.wrapping_add(SIDE)] {
                    // SAFETY: the tile was just written.
                    unsafe {
                        let tile = tile.cast::<[__m512i; 16]>();
                        tile.write(transpose(tile.read()));
                    }
                }
            }
        }
    }
}

/// An element type as bf16 bits; what lies past `count` is zero and not touched.
trait Halves: Copy {
    /// Thirty-two elements side by side.
    ///
    /// # Safety
    /// The processor has AVX-512, and `count` elements can be read.
    unsafe fn along(from: *const Self, count: usize) -> __m512i;

    /// Thirty-two pairs: one of each of two rows, each with how many it has.
    ///
    /// # Safety
    /// As `along`.
    #[inline(always)]
    unsafe fn interleaved(low: (*const Self, usize), high: (*const Self, usize)) -> [__m512i; 2] {
        // Neighbours are interleaved within 128 bits: the first sixteen go to the lower halves of those.
        // SAFETY: the caller's promise, passed on.
        unsafe {
            let spread = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
            let row = |(from, count)| _mm512_permutexvar_epi64(spread, Self::along(from, count));
            let (low, high) = (row(low), row(high));
            [_mm512_unpacklo_epi16(low, high), _mm512_unpackhi_epi16(low, high)]
        }
    }
}

#[inline(always)]
fn mask(count: usize) -> u32 {
    if count >= 32 { !0 } else { (1 << count) - 1 }
}

impl Halves for bf16 {
    #[inline(always)]
    unsafe fn along(from: *const bf16, count: usize) -> __m512i {
        // SAFETY: the caller's promise, passed on.
        unsafe { _mm512_maskz_loadu_epi16(mask(count), from.cast()) }
    }
}

impl Halves for f32 {
    #[inline(always)]
    unsafe fn along(from: *const f32, count: usize) -> __m512i {
        // SAFETY: the second half is only read where there is one.
        unsafe {
            let [low, high] = bits(from, count).map(|half| _mm512_cvtepi32_epi16(half));
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        }
    }

    #[inline(always)]
    unsafe fn interleaved(low: (*const f32, usize), high: (*const f32, usize)) -> [__m512i; 2] {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            let (low, high) = (bits(low.0, low.1), bits(high.0, high.1));
            [0, 1].map(|half| _mm512_or_si512(low[half], _mm512_slli_epi32::<16>(high[half])))
        }
    }
}

/// Thirty-two elements, each rounded, in the low half of 32 bits.
///
/// # Safety
/// As `Halves::along`.
#[inline(always)]
unsafe fn bits(from: *const f32, count: usize) -> [__m512i; 2] {
    let mask = mask(count);
    [0, 1].map(|half| {
        let (mask, from) = ((mask >> (16 * half)) as u16, from.wrapping_add(16 * half));
        // SAFETY: what the mask leaves out is not touched.
        unsafe { rounded(_mm512_maskz_loadu_ps(mask, from)) }
    })
}

/// f32 to the bits of bf16, as `Float::round_from` rounds: to nearest, ties to even, NaN stays NaN.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn rounded(wide: __m512) -> __m512i {
    let bits = _mm512_castps_si512(wide);
    let top = _mm512_srli_epi32::<16>(bits);
    let even = _mm512_and_si512(top, _mm512_set1_epi32(1));
    let up = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
    let quiet = _mm512_or_si512(top, _mm512_set1_epi32(0x40));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(wide, wide);
    _mm512_mask_mov_epi32(_mm512_srli_epi32::<16>(up), nan, quiet)
}
