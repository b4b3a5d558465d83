//! f32 vectors of each instruction set, and the dispatch of generic code to them. Knows nothing about attention.

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::cpu::Level;
use portable::Portable;

/// A vector register of f32.
///
/// # Safety
/// Methods may be called only where the instructions are available: inside `WithSimd::with_simd`, called by `dispatch`.
/// Loads and stores access `LANES` elements of any alignment.
pub(super) trait Vector: Copy {
    const LANES: usize;
    /// Rows of accumulators of a matrix product, by its number of vectors per row; 0 if that number is not used.
    const MAX_ROWS: [usize; 5];
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// `self * by + plus`
    unsafe fn mul_add(self, by: Self, plus: Self) -> Self;
    /// The larger value, or `other` if either is NaN.
    unsafe fn max(self, other: Self) -> Self;
    /// 2^x for x up to 127; zero below about -126.
    unsafe fn exp2(self) -> Self;
    /// `yes` where `self >= least`, otherwise `no`.
    unsafe fn select_ge(self, least: f32, yes: Self, no: Self) -> Self;
    /// Two values rounded to bf16 in each lane, `low` in the lower half. Ties round away from zero.
    unsafe fn bf16_pair(low: Self, high: Self) -> Self;
    /// Stores both vectors consecutively, rounded to bf16 in the same way.
    unsafe fn store_bf16(first: Self, second: Self, to: *mut u16);
    /// Transposes a square of `LANES` rows.
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize);
}

/// Code that is generic over the vector type. Everything it calls must be `#[inline(always)]`, so that it is compiled
/// once per level with that level's instructions.
pub(super) trait WithSimd {
    /// # Safety
    /// As documented at the implementing type.
    unsafe fn with_simd<V: Vector>(self);
}

/// Runs a job with the vectors of a level.
///
/// # Safety
/// As documented at the job's type; the processor must support the level, which `Cpu::at` checks.
#[inline(always)]
pub(super) unsafe fn dispatch<J: WithSimd>(level: Level, job: J) {
    // SAFETY: the caller's promise.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Amx | Level::Avx512 => x86::with_avx512(job),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => x86::with_avx2(job),
            _ => job.with_simd::<Portable>(),
        }
    }
}

/// Prefetches the cache lines of some elements. Rows of a fused matrix are pages apart, which the hardware prefetcher
/// does not follow.
#[inline(always)]
pub(super) fn prefetch<T>(from: *const T, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for byte in (0..len * size_of::<T>()).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has the instruction, and any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast::<i8>().wrapping_add(byte)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, len);
}

/// Prefetch distance in rows.
pub(super) const PREFETCH_ROWS: usize = 12;

/// 2^r = Σ `EXP2_COEFFICIENTS[i] r^i` for -1/2 <= r <= 1/2 with an error below 2e-9: a Remez fit of the relative error
/// with the first coefficient fixed to 1, so that 2^0 is exact.
const EXP2_COEFFICIENTS: [f32; 7] = [
    1.0,
    std::f32::consts::LN_2, // 0.693147206 fitted: the same f32
    0.240_226_47,
    0.055_503_29,
    0.009_618_489,
    0.001_339_993_2,
    0.000_153_458_27,
];

/// Adding it leaves the nearest integer in the lowest bits.
const ROUNDER: f32 = 12_582_912.0; // 1.5 * 2^23

/// Smallest exponent of a normal number.
const MIN_EXPONENT: f32 = -126.0;

/// Half a unit in the last place of bf16, in the bits of an f32.
const HALF_ULP: u32 = 0x8000;

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a check at every level that this machine supports.
    fn at_every_level(check: impl Fn(Level)) {
        Level::of_this_machine().and_below().for_each(check);
    }

    struct Exp2<'a>(&'a mut [f32]);

    impl WithSimd for Exp2<'_> {
        #[inline(always)]
        unsafe fn with_simd<V: Vector>(self) {
            for chunk in self.0.chunks_exact_mut(V::LANES) {
                // SAFETY: a chunk is as long as a vector.
                unsafe { V::load(chunk.as_ptr()).exp2().store(chunk.as_mut_ptr()) };
            }
        }
    }

    #[test]
    fn powers_of_two_are_within_two_ulps() {
        at_every_level(|level| {
            let exponents: Vec<f32> = (0..1 << 16).map(|i| i as f32 * -0.001_922 + 0.3).collect();
            let mut powers = exponents.clone();
            // SAFETY: this machine supports the level.
            unsafe { dispatch(level, Exp2(&mut powers)) };
            for (x, power) in exponents.iter().zip(powers) {
                let exact = f64::from(*x).exp2();
                let ulp = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
                let error = (f64::from(power) - exact).abs();
                assert!(
                    error <= 2.0 * ulp,
                    "2^{x} is {power:e} at {level:?}: {} ulps off",
                    error / ulp
                );
            }
        });
    }

    #[test]
    fn powers_of_two_at_the_edges() {
        at_every_level(|level| {
            let mut edges = [0.0; 16];
            edges[..6].copy_from_slice(&[0.0, -1.0, -127.0, -1e30, f32::NEG_INFINITY, f32::NAN]);
            // SAFETY: this machine supports the level.
            unsafe { dispatch(level, Exp2(&mut edges)) };
            assert_eq!(edges[..5], [1.0, 0.5, 0.0, 0.0, 0.0], "at {level:?}");
            assert!(edges[5].is_nan(), "at {level:?}");
        });
    }

    /// Transposes a square, and converts its first two rows to bf16.
    struct Conversions<'a> {
        from: &'a [f32],           // (16, 20)
        transposed: &'a mut [f32], // (16, 24)
        pairs: &'a mut [u32],
        halves: &'a mut [u16],
        lanes: &'a mut usize,
    }

    impl WithSimd for Conversions<'_> {
        #[inline(always)]
        unsafe fn with_simd<V: Vector>(self) {
            *self.lanes = V::LANES;
            // SAFETY: every slice is large enough for the widest vector.
            unsafe {
                V::transpose(self.from.as_ptr(), 20, self.transposed.as_mut_ptr(), 24);
                let (first, second) =
                    (V::load(self.from.as_ptr()), V::load(self.from.as_ptr().add(20)));
                V::bf16_pair(first, second).store(self.pairs.as_mut_ptr().cast());
                V::store_bf16(first, second, self.halves.as_mut_ptr());
            }
        }
    }

    #[test]
    fn squares_are_transposed_and_bf16_is_rounded() {
        at_every_level(|level| {
            let from: Vec<f32> = (0..16 * 20).map(|i| (i as f32 - 150.0) * 1.003).collect();
            let (mut transposed, mut pairs, mut halves) =
                (vec![0.0; 16 * 24], vec![0; 16], vec![0; 32]);
            let mut lanes = 0;
            let (to_transposed, to_pairs) = (&mut transposed[..], &mut pairs[..]);
            let conversions = Conversions {
                from: &from,
                transposed: to_transposed,
                pairs: to_pairs,
                halves: &mut halves,
                lanes: &mut lanes,
            };
            // SAFETY: this machine supports the level, and the slices are large enough for it.
            unsafe { dispatch(level, conversions) };
            for (i, j) in (0..lanes).flat_map(|i| (0..lanes).map(move |j| (i, j))) {
                assert_eq!(transposed[j * 24 + i], from[i * 20 + j], "({i}, {j}) at {level:?}");
            }
            for i in 0..lanes {
                let [first, second] =
                    [from[i], from[20 + i]].map(|x| half::bf16::from_f32(x).to_bits());
                assert_eq!(
                    [halves[i], halves[lanes + i]],
                    [first, second],
                    "lane {i} at {level:?}"
                );
                assert_eq!(
                    pairs[i],
                    u32::from(first) | u32::from(second) << 16,
                    "lane {i} at {level:?}"
                );
            }
        });
    }
}
