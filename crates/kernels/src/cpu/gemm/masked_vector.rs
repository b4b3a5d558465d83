//! Vectors with partial loads and stores, for the epilogue and for products with few rows: plain arrays, or AVX-512
//! registers with masks for the end of a row.

use super::gelu;
use crate::Float;
use half::bf16;

/// `LANES` lanes of f32, loaded from and stored to f32 or bf16.
///
/// All methods require a processor with the implementor's instructions.
pub trait MaskedVector: Copy {
    const LANES: usize;

    /// Loads `count` elements; the other lanes are zero.
    ///
    /// # Safety
    /// `count` elements can be read.
    unsafe fn load<T: Float>(from: *const T, count: usize) -> Self;

    /// Stores the first `count` lanes.
    ///
    /// # Safety
    /// `count` elements can be written.
    unsafe fn store<T: Float>(self, to: *mut T, count: usize);

    /// Stores all lanes of `self` and then of `next`.
    ///
    /// # Safety
    /// `2 * LANES` elements can be written.
    #[inline(always)]
    unsafe fn store_two<T: Float>(self, next: Self, to: *mut T) {
        // SAFETY: the caller's promise.
        unsafe {
            self.store(to, Self::LANES);
            next.store(to.add(Self::LANES), Self::LANES);
        }
    }

    /// # Safety
    /// See the trait.
    unsafe fn add(self, other: Self) -> Self;

    /// # Safety
    /// See the trait.
    unsafe fn scale(self, by: f32) -> Self;

    /// # Safety
    /// See the trait.
    unsafe fn gelu(self) -> Self;

    /// The same value in all lanes.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn splat(value: f32) -> Self;

    /// `self + a · b`.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;

    /// Rounds to the nearest bf16 values.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn round_to_bf16(self) -> Self;

    /// Sum of all lanes.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn sum(self) -> f32;
}

impl MaskedVector for [f32; 8] {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn load<T: Float>(from: *const T, count: usize) -> Self {
        let mut lanes = [0.0; 8];
        for (i, lane) in lanes.iter_mut().enumerate().take(count) {
            // SAFETY: the caller's promise.
            *lane = unsafe { *from.add(i) }.as_f32();
        }
        lanes
    }

    #[inline(always)]
    unsafe fn store<T: Float>(self, to: *mut T, count: usize) {
        for (i, lane) in self.iter().enumerate().take(count) {
            // SAFETY: the caller's promise.
            unsafe { *to.add(i) = T::round_from(*lane) };
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        let mut sum = self;
        sum.iter_mut().zip(other).for_each(|(x, y)| *x += y);
        sum
    }

    #[inline(always)]
    unsafe fn scale(self, by: f32) -> Self {
        self.map(|lane| lane * by)
    }

    #[inline(always)]
    unsafe fn gelu(self) -> Self {
        self.map(gelu::gelu)
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        [value; 8]
    }

    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        let mut sum = self;
        for lane in 0..8 {
            sum[lane] += a[lane] * b[lane];
        }
        sum
    }

    #[inline(always)]
    unsafe fn round_to_bf16(self) -> Self {
        self.map(|lane| bf16::round_from(lane).as_f32())
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
}

#[cfg(target_arch = "x86_64")]
pub use avx512::Zmm;

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::super::{gelu, pack_bf16};
    use super::MaskedVector;
    use crate::{Dtype, Float};
    use std::arch::x86_64::*;

    #[inline(always)]
    fn mask(count: usize) -> __mmask16 {
        if count >= 16 { !0 } else { (1 << count) - 1 }
    }

    /// An AVX-512 register. With `NATIVE` it is rounded by the bf16 instruction, which treats denormals as zero.
    #[derive(Clone, Copy)]
    pub struct Zmm<const NATIVE: bool>(__m512);

    impl<const NATIVE: bool> MaskedVector for Zmm<NATIVE> {
        const LANES: usize = 16;

        #[inline(always)]
        unsafe fn load<T: Float>(from: *const T, count: usize) -> Self {
            // SAFETY: the caller's promise; the pointer has the type that is matched on.
            Zmm(unsafe {
                match T::DTYPE {
                    Dtype::Bf16 => {
                        let bits = _mm256_maskz_loadu_epi16(mask(count), from.cast());
                        let bits = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits));
                        _mm512_castsi512_ps(bits)
                    }
                    _ => _mm512_maskz_loadu_ps(mask(count), from.cast()),
                }
            })
        }

        #[inline(always)]
        unsafe fn store<T: Float>(self, to: *mut T, count: usize) {
            // SAFETY: the caller's promise; the pointer has the type that is matched on, and both 256-bit types
            // have the same layout.
            unsafe {
                match T::DTYPE {
                    Dtype::Bf16 => {
                        let bits: __m256i = match NATIVE {
                            true => {
                                std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(self.0))
                            }
                            false => _mm512_cvtepi32_epi16(pack_bf16::round_to_bf16(self.0)),
                        };
                        _mm256_mask_storeu_epi16(to.cast(), mask(count), bits);
                    }
                    _ => _mm512_mask_storeu_ps(to.cast(), mask(count), self.0),
                }
            }
        }

        #[inline(always)]
        unsafe fn store_two<T: Float>(self, next: Self, to: *mut T) {
            // SAFETY: the caller's promise; both 512-bit types have the same layout.
            unsafe {
                if NATIVE && T::DTYPE == Dtype::Bf16 {
                    // A whole cache line in one store.
                    let halves = _mm512_cvtne2ps_pbh(next.0, self.0);
                    let bits = std::mem::transmute::<__m512bh, __m512i>(halves);
                    _mm512_storeu_si512(to.cast(), bits);
                } else {
                    self.store(to, 16);
                    next.store(to.add(16), 16);
                }
            }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: the caller's promise.
            Zmm(unsafe { _mm512_add_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn scale(self, by: f32) -> Self {
            // SAFETY: the caller's promise.
            Zmm(unsafe { _mm512_mul_ps(self.0, _mm512_set1_ps(by)) })
        }

        #[inline(always)]
        unsafe fn gelu(self) -> Self {
            // SAFETY: the caller's promise.
            Zmm(unsafe { gelu::gelu_x16(self.0) })
        }

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: the caller's promise.
            Zmm(unsafe { _mm512_set1_ps(value) })
        }

        #[inline(always)]
        unsafe fn add_product(self, a: Self, b: Self) -> Self {
            // SAFETY: the caller's promise.
            Zmm(unsafe { _mm512_fmadd_ps(a.0, b.0, self.0) })
        }

        #[inline(always)]
        unsafe fn round_to_bf16(self) -> Self {
            // SAFETY: the caller's promise.
            unsafe {
                let bits = _mm512_slli_epi32::<16>(pack_bf16::round_to_bf16(self.0));
                Zmm(_mm512_castsi512_ps(bits))
            }
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            // SAFETY: the caller's promise.
            unsafe { _mm512_reduce_add_ps(self.0) }
        }
    }
}
