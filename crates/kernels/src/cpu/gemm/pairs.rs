//! Packing an operand into bf16 tiles for AMX. A tile is 1 KiB, sixteen rows of sixteen pairs; a pair is two
//! neighbours along k in 32 bits. On the side of `a` a row is a lane and its pairs run along k; on the side
//! of `b` a row is a pair of k, and its pairs run over lanes: each is the other one's transpose.

use super::transpose::transpose;
use super::{Data, Operand};
use half::bf16;
use std::arch::x86_64::*;

/// Lanes, and pairs along k, of a tile.
pub const SIDE: usize = 16;
/// Elements along k of a tile.
pub const DEEP: usize = 32;
/// Elements of a tile.
pub const TILE: usize = SIDE * DEEP;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Side {
    A,
    B,
}

/// Packs up to 32 lanes, k from `k0` to `k1`, as two columns of tiles that alternate:
/// `panel[k / 32][lane / 16]` is a tile. What is not there is zero.
///
/// # Safety
/// The processor has AVX-512; the lanes and k lie in the operand; `panel` has room for whole tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub unsafe fn pack(
    from: &Operand<'_>,
    side: Side,
    lane: usize,
    lanes: usize,
    k0: usize,
    k1: usize,
    panel: *mut bf16,
) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match from.data {
            Data::F32(values) => {
                pack_from::<f32>(from, values.as_ptr(), side, lane, lanes, k0, k1, panel)
            }
            Data::Bf16(values) => {
                pack_from::<bf16>(from, values.as_ptr(), side, lane, lanes, k0, k1, panel)
            }
        }
    }
}

/// # Safety
/// As `pack`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[allow(clippy::too_many_arguments)] // `pack` with its elements' type taken out of the loop
unsafe fn pack_from<T: Halves>(
    from: &Operand<'_>,
    elements: *const T,
    side: Side,
    lane: usize,
    lanes: usize,
    k0: usize,
    k1: usize,
    panel: *mut bf16,
) {
    let mut to = panel.cast::<__m512i>();
    for k in (k0..k1).step_by(DEEP) {
        let depth = (k1 - k).min(DEEP);
        for first in [0, SIDE] {
            let count = lanes.saturating_sub(first).min(SIDE);
            // SAFETY: `tile` reads `count` lanes of `depth` elements from here, which the operand has; with no
            // lane left it reads nothing. The panel has room for each tile.
            unsafe {
                let here =
                    if count > 0 { elements.add(from.index(lane + first, k)) } else { elements };
                tile(here, from.stride, from.k_runs, side, count, depth, to);
                to = to.add(SIDE);
            }
        }
    }
}

/// # Safety
/// As `pack`, for one tile that begins at `from`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn tile<T: Halves>(
    from: *const T,
    stride: usize,
    k_runs: bool,
    side: Side,
    count: usize,
    depth: usize,
    to: *mut __m512i,
) {
    let mut rows = [_mm512_setzero_si512(); 16];
    // SAFETY: reads stay within `count` lanes and `depth` elements of each; the tile has sixteen rows.
    unsafe {
        if k_runs {
            for (lane, row) in rows.iter_mut().enumerate() {
                if lane < count {
                    *row = T::along(from.add(lane * stride), depth);
                }
            }
        } else {
            for (pair, row) in rows.iter_mut().enumerate() {
                if 2 * pair < depth {
                    let first = from.add(2 * pair * stride);
                    let low = T::bits(first, count);
                    // An odd k has no second half; it is read as zero, not past the end.
                    let high = if 2 * pair + 1 < depth {
                        T::bits(first.add(stride), count)
                    } else {
                        _mm512_setzero_si512()
                    };
                    *row = _mm512_or_si512(low, _mm512_slli_epi32::<16>(high));
                }
            }
        }
        if k_runs == (side == Side::B) {
            rows = transpose(rows);
        }
        for (i, row) in rows.iter().enumerate() {
            _mm512_storeu_si512(to.add(i), *row);
        }
    }
}

/// An element type as bf16 bits; what lies past `count` is zero and not touched.
trait Halves: Copy {
    /// Sixteen elements, each in the low half of 32 bits.
    ///
    /// # Safety
    /// The processor has AVX-512, and `count` elements can be read.
    unsafe fn bits(from: *const Self, count: usize) -> __m512i;

    /// Thirty-two elements side by side.
    ///
    /// # Safety
    /// As `bits`.
    unsafe fn along(from: *const Self, count: usize) -> __m512i;
}

#[inline(always)]
fn mask(count: usize) -> u32 {
    if count >= 32 { !0 } else { (1 << count) - 1 }
}

impl Halves for bf16 {
    #[inline(always)]
    unsafe fn bits(from: *const bf16, count: usize) -> __m512i {
        // SAFETY: the caller's promise, passed on.
        unsafe { _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask(count) as u16, from.cast())) }
    }

    #[inline(always)]
    unsafe fn along(from: *const bf16, count: usize) -> __m512i {
        // SAFETY: the caller's promise, passed on.
        unsafe { _mm512_maskz_loadu_epi16(mask(count), from.cast()) }
    }
}

impl Halves for f32 {
    #[inline(always)]
    unsafe fn bits(from: *const f32, count: usize) -> __m512i {
        // SAFETY: the caller's promise, passed on.
        unsafe { rounded(_mm512_maskz_loadu_ps(mask(count) as u16, from)) }
    }

    #[inline(always)]
    unsafe fn along(from: *const f32, count: usize) -> __m512i {
        // SAFETY: the second half is only read, and only pointed at, where there is one.
        unsafe {
            let low = _mm512_cvtepi32_epi16(Self::bits(from, count.min(16)));
            let high = match count.saturating_sub(16) {
                0 => _mm256_setzero_si256(),
                rest => _mm512_cvtepi32_epi16(Self::bits(from.add(16), rest)),
            };
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        }
    }
}

/// f32 to the bits of bf16, as `Float::narrow` rounds: to nearest, ties to even, NaN stays NaN.
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
