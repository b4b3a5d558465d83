//! Packing an operand into bf16 tiles for AMX. A tile is 1 KiB, sixteen rows of sixteen pairs; a pair is two
//! neighbours along k in 32 bits (the VNNI layout). A tile row of `a` is a matrix row with its pairs along k; a tile
//! row of `b` is a pair of k for sixteen columns. Each is the transpose of the other.

use super::Data;
use super::panel::PackJob;
use super::transpose::transpose;
use half::bf16;
use std::arch::x86_64::*;

/// Rows of a tile, and pairs per row.
pub const SIDE: usize = 16;
/// Elements of a tile along k.
pub const TILE_K: usize = 32;
/// Elements of a tile.
pub const TILE: usize = SIDE * TILE_K;

/// Prefetch distance in rows of memory. The hardware prefetcher does not follow page-sized strides.
const PREFETCH_ROWS: usize = 16;

/// Packs panels of 32 rows or columns, as tiles `[k / 32][outer / 16]` padded with zeros.
///
/// # Safety
/// The processor has AVX-512; the job's range is within its operand; `panels` can hold whole tiles.
pub unsafe fn pack_a(job: &PackJob<'_>, panels: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { pack::<true>(job, panels.cast()) }
}

/// # Safety
/// As `pack_a`.
pub unsafe fn pack_b(job: &PackJob<'_>, panels: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { pack::<false>(job, panels.cast()) }
}

/// # Safety
/// As `pack_a`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn pack<const IS_A: bool>(job: &PackJob<'_>, panels: *mut __m512i) {
    // SAFETY: the caller's promise.
    unsafe {
        match (job.from.data, job.from.k_contiguous) {
            (Data::F32(values), true) => along_k::<f32, IS_A>(job, values.as_ptr(), panels),
            (Data::F32(values), false) => across_k::<f32, IS_A>(job, values.as_ptr(), panels),
            (Data::Bf16(values), true) => along_k::<bf16, IS_A>(job, values.as_ptr(), panels),
            (Data::Bf16(values), false) => across_k::<bf16, IS_A>(job, values.as_ptr(), panels),
        }
    }
}

/// Elements along k are contiguous, so pairs are adjacent: the layout of `a`. Tiles of `b` are transposed.
///
/// # Safety
/// As `pack_a`.
#[inline(always)]
unsafe fn along_k<T: ToBf16, const IS_A: bool>(
    job: &PackJob<'_>,
    from: *const T,
    panels: *mut __m512i,
) {
    let stride = job.from.stride;
    for (panel, outer) in job.outer.clone().step_by(job.width).enumerate() {
        let mut to = panels.wrapping_add(panel * job.panel_stride / TILE_K);
        for k in job.ks.clone().step_by(TILE_K) {
            let ks = (job.ks.end - k).min(TILE_K);
            for first in [outer, outer + SIDE] {
                let count = job.outer.end.saturating_sub(first).min(SIDE);
                // SAFETY: only the job's range is read, and the panels can hold each tile.
                unsafe {
                    let mut rows = [_mm512_setzero_si512(); 16];
                    for (i, row) in rows.iter_mut().enumerate() {
                        if i < count {
                            let source = from.add((first + i) * stride + k);
                            // The next panel is packed after this one has been used; prefetch it now.
                            let next = source.wrapping_add(job.width * stride);
                            _mm_prefetch::<_MM_HINT_T1>(next.cast());
                            *row = T::load_32(source, ks);
                        }
                    }
                    if !IS_A {
                        rows = transpose(rows);
                    }
                    rows.iter().enumerate().for_each(|(i, row)| to.add(i).write(*row));
                    to = to.add(SIDE);
                }
            }
        }
    }
}

/// Elements of one k are contiguous: two rows of memory are interleaved into tile rows of all panels at once, the
/// layout of `b`. Tiles of `a` are transposed while they are in cache.
///
/// # Safety
/// As `pack_a`.
#[inline(always)]
unsafe fn across_k<T: ToBf16, const IS_A: bool>(
    job: &PackJob<'_>,
    from: *const T,
    panels: *mut __m512i,
) {
    let stride = job.from.stride;
    for (step, k) in job.ks.clone().step_by(TILE_K).enumerate() {
        // The two tiles of each panel for this step along k.
        let slabs = || {
            let starts = job.outer.clone().step_by(job.width).enumerate();
            let slab = panels.wrapping_add(step * 2 * SIDE);
            starts.map(move |(panel, outer)| {
                (slab.wrapping_add(panel * job.panel_stride / TILE_K), outer)
            })
        };
        for pair in 0..SIDE {
            let rows = job.ks.end.saturating_sub(k + 2 * pair).min(2);
            let first = from.wrapping_add((k + 2 * pair) * stride);
            for (slab, outer) in slabs() {
                let count = (job.outer.end - outer).min(2 * SIDE);
                let count_of = |row| if row < rows { count } else { 0 };
                let source = first.wrapping_add(outer);
                // SAFETY: only the job's range is read; both tiles are in their panel.
                unsafe {
                    for line in (0..2 * SIDE).step_by(64 / size_of::<T>()) {
                        let ahead = source.wrapping_add(PREFETCH_ROWS * stride + line);
                        _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                        _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(stride).cast());
                    }
                    let low = (source, count_of(0));
                    let high = (source.wrapping_add(stride), count_of(1));
                    let [left, right] = T::load_pairs(low, high);
                    slab.add(pair).write(left);
                    slab.add(SIDE + pair).write(right);
                }
            }
        }
        if IS_A {
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

/// Loads of an element type as bf16 bits. Elements past `count` are zero, and their memory is not accessed.
trait ToBf16: Copy {
    /// 32 contiguous elements.
    ///
    /// # Safety
    /// The processor has AVX-512, and `count` elements can be read.
    unsafe fn load_32(from: *const Self, count: usize) -> __m512i;

    /// 32 pairs of one element each of two rows, given with their lengths.
    ///
    /// # Safety
    /// As `load_32`.
    #[inline(always)]
    unsafe fn load_pairs(low: (*const Self, usize), high: (*const Self, usize)) -> [__m512i; 2] {
        // Unpacking interleaves within 128 bits, so the first sixteen are moved to the lower halves of those.
        // SAFETY: the caller's promise.
        unsafe {
            let spread = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
            let row = |(from, count)| _mm512_permutexvar_epi64(spread, Self::load_32(from, count));
            let (low, high) = (row(low), row(high));
            [_mm512_unpacklo_epi16(low, high), _mm512_unpackhi_epi16(low, high)]
        }
    }
}

#[inline(always)]
fn mask(count: usize) -> u32 {
    if count >= 32 { !0 } else { (1 << count) - 1 }
}

impl ToBf16 for bf16 {
    #[inline(always)]
    unsafe fn load_32(from: *const bf16, count: usize) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_epi16(mask(count), from.cast()) }
    }
}

impl ToBf16 for f32 {
    #[inline(always)]
    unsafe fn load_32(from: *const f32, count: usize) -> __m512i {
        // SAFETY: the second half is only read where there is one.
        unsafe {
            let [low, high] = bits(from, count).map(|half| _mm512_cvtepi32_epi16(half));
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        }
    }

    #[inline(always)]
    unsafe fn load_pairs(low: (*const f32, usize), high: (*const f32, usize)) -> [__m512i; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let (low, high) = (bits(low.0, low.1), bits(high.0, high.1));
            [0, 1].map(|half| _mm512_or_si512(low[half], _mm512_slli_epi32::<16>(high[half])))
        }
    }
}

/// 32 elements rounded to bf16, each in the low half of 32 bits.
///
/// # Safety
/// As `ToBf16::load_32`.
#[inline(always)]
unsafe fn bits(from: *const f32, count: usize) -> [__m512i; 2] {
    let mask = mask(count);
    [0, 1].map(|half| {
        let (mask, from) = ((mask >> (16 * half)) as u16, from.wrapping_add(16 * half));
        // SAFETY: elements outside the mask are not accessed.
        unsafe { round_to_bf16(_mm512_maskz_loadu_ps(mask, from)) }
    })
}

/// Rounds f32 to the bits of bf16 in the same way as `Float`: to nearest, ties to even, NaN stays NaN.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn round_to_bf16(values: __m512) -> __m512i {
    let bits = _mm512_castps_si512(values);
    let top = _mm512_srli_epi32::<16>(bits);
    let even = _mm512_and_si512(top, _mm512_set1_epi32(1));
    let up = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
    let quiet = _mm512_or_si512(top, _mm512_set1_epi32(0x40));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
    _mm512_mask_mov_epi32(_mm512_srli_epi32::<16>(up), nan, quiet)
}
