//! Vectors of AVX2 and AVX-512.

use super::{EXP2_COEFFICIENTS, HALF_ULP, MIN_EXPONENT, ROUNDER, Vector, WithSimd};
use std::arch::x86_64::*;

#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn with_avx2<J: WithSimd>(job: J) {
    // SAFETY: the caller's promise.
    unsafe { job.with_simd::<Avx2>() }
}

#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn with_avx512<J: WithSimd>(job: J) {
    // SAFETY: the caller's promise.
    unsafe { job.with_simd::<Avx512>() }
}

#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256);
#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

// All unsafe blocks below are sound because the trait restricts calls to where the instructions are available, and
// because the caller guarantees the pointers.

impl Vector for Avx2 {
    const LANES: usize = 8;
    const MAX_ROWS: [usize; 5] = [0, 8, 6, 0, 0];

    #[inline(always)]
    unsafe fn splat(x: f32) -> Avx2 {
        // SAFETY: see above.
        Avx2(unsafe { _mm256_set1_ps(x) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Avx2 {
        // SAFETY: see above.
        Avx2(unsafe { _mm256_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Avx2) -> Avx2 {
        // SAFETY: see above.
        Avx2(unsafe { _mm256_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn sub(self, other: Avx2) -> Avx2 {
        // SAFETY: see above.
        Avx2(unsafe { _mm256_sub_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul(self, other: Avx2) -> Avx2 {
        // SAFETY: see above.
        Avx2(unsafe { _mm256_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul_add(self, by: Avx2, plus: Avx2) -> Avx2 {
        // SAFETY: see above.
        Avx2(unsafe { _mm256_fmadd_ps(self.0, by.0, plus.0) })
    }
    #[inline(always)]
    unsafe fn max(self, other: Avx2) -> Avx2 {
        // SAFETY: see above.
        Avx2(unsafe { _mm256_max_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn exp2(self) -> Avx2 {
        // SAFETY: see above.
        unsafe {
            let shifted = _mm256_add_ps(self.0, _mm256_set1_ps(ROUNDER));
            let fraction = _mm256_sub_ps(self.0, _mm256_sub_ps(shifted, _mm256_set1_ps(ROUNDER)));
            let mut power = _mm256_set1_ps(EXP2_COEFFICIENTS[6]);
            for c in EXP2_COEFFICIENTS[..6].iter().rev() {
                power = _mm256_fmadd_ps(power, fraction, _mm256_set1_ps(*c));
            }
            let shift = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
            let scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(power), shift));
            // NaN compares as not less, and x - x restores it.
            let scaled = _mm256_add_ps(scaled, _mm256_sub_ps(self.0, self.0));
            _mm256_andnot_ps(
                _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, _mm256_set1_ps(MIN_EXPONENT)),
                scaled,
            )
            .into()
        }
    }
    #[inline(always)]
    unsafe fn select_ge(self, least: f32, yes: Avx2, no: Avx2) -> Avx2 {
        // SAFETY: see above.
        unsafe {
            let mask = _mm256_cmp_ps::<_CMP_GE_OQ>(self.0, _mm256_set1_ps(least));
            _mm256_blendv_ps(no.0, yes.0, mask).into()
        }
    }
    #[inline(always)]
    unsafe fn bf16_pair(low: Avx2, high: Avx2) -> Avx2 {
        // SAFETY: see above.
        unsafe {
            let half = _mm256_set1_epi32(HALF_ULP as i32);
            let low = _mm256_srli_epi32::<16>(_mm256_add_epi32(_mm256_castps_si256(low.0), half));
            let high = _mm256_add_epi32(_mm256_castps_si256(high.0), half);
            _mm256_castsi256_ps(_mm256_blend_epi16::<0xaa>(low, high)).into()
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(first: Avx2, second: Avx2, to: *mut u16) {
        // SAFETY: see above.
        unsafe {
            let half = _mm256_set1_epi32(HALF_ULP as i32);
            let top =
                |x: __m256| _mm256_srli_epi32::<16>(_mm256_add_epi32(_mm256_castps_si256(x), half));
            let packed = _mm256_packus_epi32(top(first.0), top(second.0));
            _mm256_storeu_si256(to.cast(), _mm256_permute4x64_epi64::<0xd8>(packed));
        }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: see above.
        unsafe {
            let mut rows = [_mm256_setzero_ps(); 8];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = _mm256_loadu_ps(from.add(i * from_stride));
            }
            // Interleave pairs, then fours, then the two halves.
            let mut pairs = rows;
            for i in 0..4 {
                pairs[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
                pairs[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
            }
            let mut fours = rows;
            for i in 0..2 {
                for j in 0..2 {
                    let (a, b) = (pairs[4 * i + j], pairs[4 * i + 2 + j]);
                    fours[4 * i + 2 * j] = _mm256_shuffle_ps::<0x44>(a, b);
                    fours[4 * i + 2 * j + 1] = _mm256_shuffle_ps::<0xee>(a, b);
                }
            }
            for j in 0..4 {
                let (a, b) = (fours[j], fours[j + 4]);
                _mm256_storeu_ps(to.add(j * to_stride), _mm256_permute2f128_ps::<0x20>(a, b));
                _mm256_storeu_ps(to.add((j + 4) * to_stride), _mm256_permute2f128_ps::<0x31>(a, b));
            }
        }
    }
}

impl From<__m256> for Avx2 {
    #[inline(always)]
    fn from(register: __m256) -> Avx2 {
        Avx2(register)
    }
}

impl Vector for Avx512 {
    const LANES: usize = 16;
    const MAX_ROWS: [usize; 5] = [0, 8, 8, 8, 6];

    #[inline(always)]
    unsafe fn splat(x: f32) -> Avx512 {
        // SAFETY: see above.
        Avx512(unsafe { _mm512_set1_ps(x) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Avx512 {
        // SAFETY: see above.
        Avx512(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Avx512) -> Avx512 {
        // SAFETY: see above.
        Avx512(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn sub(self, other: Avx512) -> Avx512 {
        // SAFETY: see above.
        Avx512(unsafe { _mm512_sub_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul(self, other: Avx512) -> Avx512 {
        // SAFETY: see above.
        Avx512(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul_add(self, by: Avx512, plus: Avx512) -> Avx512 {
        // SAFETY: see above.
        Avx512(unsafe { _mm512_fmadd_ps(self.0, by.0, plus.0) })
    }
    #[inline(always)]
    unsafe fn max(self, other: Avx512) -> Avx512 {
        // SAFETY: see above.
        Avx512(unsafe { _mm512_max_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn exp2(self) -> Avx512 {
        // SAFETY: see above.
        unsafe {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            let integer = _mm512_roundscale_ps::<NEAREST>(self.0);
            let fraction = _mm512_sub_ps(self.0, integer);
            let mut power = _mm512_set1_ps(EXP2_COEFFICIENTS[6]);
            for c in EXP2_COEFFICIENTS[..6].iter().rev() {
                power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(*c));
            }
            // Lanes with a subnormal result are masked out: one of them costs more than a hundred others. NaN is not
            // less than anything, so it stays.
            let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(self.0, _mm512_set1_ps(MIN_EXPONENT));
            Avx512(_mm512_maskz_scalef_ps(normal, power, integer))
        }
    }
    #[inline(always)]
    unsafe fn select_ge(self, least: f32, yes: Avx512, no: Avx512) -> Avx512 {
        // SAFETY: see above.
        unsafe {
            let mask = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(self.0, _mm512_set1_ps(least));
            Avx512(_mm512_mask_blend_ps(mask, no.0, yes.0))
        }
    }
    #[inline(always)]
    unsafe fn bf16_pair(low: Avx512, high: Avx512) -> Avx512 {
        // SAFETY: see above.
        unsafe {
            let half = _mm512_set1_epi32(HALF_ULP as i32);
            let low = _mm512_srli_epi32::<16>(_mm512_add_epi32(_mm512_castps_si512(low.0), half));
            let high = _mm512_add_epi32(_mm512_castps_si512(high.0), half);
            Avx512(_mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaa_aaaa, low, high)))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(first: Avx512, second: Avx512, to: *mut u16) {
        // SAFETY: see above.
        unsafe {
            let half = _mm512_set1_epi32(HALF_ULP as i32);
            let first = _mm512_add_epi32(_mm512_castps_si512(first.0), half);
            let second = _mm512_add_epi32(_mm512_castps_si512(second.0), half);
            // The upper halves of all lanes of the first vector, then of the second.
            let uppers = _mm512_set_epi16(
                63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23,
                21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,
            );
            let both = _mm512_permutex2var_epi16(first, uppers, second);
            _mm512_storeu_si512(to.cast(), both);
        }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: see above.
        unsafe {
            let mut rows = [_mm512_setzero_ps(); 16];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = _mm512_loadu_ps(from.add(i * from_stride));
            }
            // Interleave pairs, then fours, within 128-bit quarters.
            let mut pairs = rows;
            for i in 0..8 {
                pairs[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
                pairs[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
            }
            let mut fours = rows;
            for i in 0..4 {
                for j in 0..2 {
                    let (a, b) = (pairs[4 * i + j], pairs[4 * i + 2 + j]);
                    fours[4 * i + 2 * j] = _mm512_shuffle_ps::<0x44>(a, b);
                    fours[4 * i + 2 * j + 1] = _mm512_shuffle_ps::<0xee>(a, b);
                }
            }
            // Quarter q of fours[4 i + j] is column 4 q + j of rows 4 i to 4 i + 3.
            for j in 0..4 {
                let [a, b, c, d] = [fours[j], fours[4 + j], fours[8 + j], fours[12 + j]];
                let (ab_low, ab_high) =
                    (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
                let (cd_low, cd_high) =
                    (_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
                let columns = [
                    _mm512_shuffle_f32x4::<0x88>(ab_low, cd_low),
                    _mm512_shuffle_f32x4::<0xdd>(ab_low, cd_low),
                    _mm512_shuffle_f32x4::<0x88>(ab_high, cd_high),
                    _mm512_shuffle_f32x4::<0xdd>(ab_high, cd_high),
                ];
                for (q, column) in columns.into_iter().enumerate() {
                    _mm512_storeu_ps(to.add((4 * q + j) * to_stride), column);
                }
            }
        }
    }
}
