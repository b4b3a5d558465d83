//! A few neighbouring elements as one: what the epilogue and the product of few rows compute with. Plain arrays, or AVX-512 registers with
//! masks for the short end of a row.

use super::gelu;
use crate::Float;
use half::bf16;

/// `COUNT` lanes of f32, read from and written to either type.
///
/// All methods ask that the processor has the implementor's instructions.
pub trait Wide: Copy {
    const COUNT: usize;

    /// # Safety
    /// `count` elements can be read; further lanes are zero.
    unsafe fn get<T: Float>(from: *const T, count: usize) -> Self;

    /// # Safety
    /// `count` elements can be written; further lanes are not.
    unsafe fn put<T: Float>(self, to: *mut T, count: usize);

    /// Writes two side by side.
    ///
    /// # Safety
    /// `2 * COUNT` elements can be written.
    #[inline(always)]
    unsafe fn put_both<T: Float>(self, next: Self, to: *mut T) {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            self.put(to, Self::COUNT);
            next.put(to.add(Self::COUNT), Self::COUNT);
        }
    }

    /// # Safety
    /// As all.
    unsafe fn plus(self, other: Self) -> Self;

    /// # Safety
    /// As all.
    unsafe fn times(self, by: f32) -> Self;

    /// # Safety
    /// As all.
    unsafe fn gelu(self) -> Self;

    /// The same value in all lanes.
    ///
    /// # Safety
    /// As all.
    unsafe fn all(value: f32) -> Self;

    /// `self + a · b`.
    ///
    /// # Safety
    /// As all.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;

    /// To the nearest values of bf16.
    ///
    /// # Safety
    /// As all.
    unsafe fn rounded(self) -> Self;

    /// Of all lanes.
    ///
    /// # Safety
    /// As all.
    unsafe fn total(self) -> f32;
}

impl Wide for [f32; 8] {
    const COUNT: usize = 8;

    #[inline(always)]
    unsafe fn get<T: Float>(from: *const T, count: usize) -> Self {
        let mut lanes = [0.0; 8];
        for (i, lane) in lanes.iter_mut().enumerate().take(count) {
            // SAFETY: the caller's promise, passed on.
            *lane = unsafe { *from.add(i) }.as_f32();
        }
        lanes
    }

    #[inline(always)]
    unsafe fn put<T: Float>(self, to: *mut T, count: usize) {
        for (i, lane) in self.iter().enumerate().take(count) {
            // SAFETY: the caller's promise, passed on.
            unsafe { *to.add(i) = T::round_from(*lane) };
        }
    }

    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        let mut sum = self;
        sum.iter_mut().zip(other).for_each(|(x, y)| *x += y);
        sum
    }

    #[inline(always)]
    unsafe fn times(self, by: f32) -> Self {
        self.map(|lane| lane * by)
    }

    #[inline(always)]
    unsafe fn gelu(self) -> Self {
        self.map(gelu::gelu)
    }

    #[inline(always)]
    unsafe fn all(value: f32) -> Self {
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
    unsafe fn rounded(self) -> Self {
        self.map(|lane| bf16::round_from(lane).as_f32())
    }

    #[inline(always)]
    unsafe fn total(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
}

#[cfg(target_arch = "x86_64")]
pub use avx512::Zmm;

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::super::{gelu, pairs};
    use super::Wide;
    use crate::{Dtype, Float};
    use std::arch::x86_64::*;

    #[inline(always)]
    fn mask(count: usize) -> __mmask16 {
        if count >= 16 { !0 } else { (1 << count) - 1 }
    }

    /// A register; with `NATIVE` it is rounded by the instruction for it, which takes denormals for zero.
    #[derive(Clone, Copy)]
    pub struct Zmm<const NATIVE: bool>(__m512);

    impl<const NATIVE: bool> Wide for Zmm<NATIVE> {
        const COUNT: usize = 16;

        #[inline(always)]
        unsafe fn get<T: Float>(from: *const T, count: usize) -> Self {
            // SAFETY: the caller's promise, passed on; the pointer is of the type that was asked.
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
        unsafe fn put<T: Float>(self, to: *mut T, count: usize) {
            // SAFETY: the caller's promise, passed on; the pointer is of the type that was asked, and the two
            // kinds of sixteen halves are the same bits.
            unsafe {
                match T::DTYPE {
                    Dtype::Bf16 => {
                        let bits: __m256i = match NATIVE {
                            true => {
                                std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(self.0))
                            }
                            false => _mm512_cvtepi32_epi16(pairs::rounded(self.0)),
                        };
                        _mm256_mask_storeu_epi16(to.cast(), mask(count), bits);
                    }
                    _ => _mm512_mask_storeu_ps(to.cast(), mask(count), self.0),
                }
            }
        }

        #[inline(always)]
        unsafe fn put_both<T: Float>(self, next: Self, to: *mut T) {
            // SAFETY: the caller's promise, passed on; thirty-two halves are the same bits in either type.
            unsafe {
                if NATIVE && T::DTYPE == Dtype::Bf16 {
                    // A whole line in one store.
                    let halves = _mm512_cvtne2ps_pbh(next.0, self.0);
                    let bits = std::mem::transmute::<__m512bh, __m512i>(halves);
                    _mm512_storeu_si512(to.cast(), bits);
                } else {
                    self.put(to, 16);
                    next.put(to.add(16), 16);
                }
            }
        }

        #[inline(always)]
        unsafe fn plus(self, other: Self) -> Self {
            // SAFETY: the caller's promise, passed on.
            Zmm(unsafe { _mm512_add_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn times(self, by: f32) -> Self {
            // SAFETY: the caller's promise, passed on.
            Zmm(unsafe { _mm512_mul_ps(self.0, _mm512_set1_ps(by)) })
        }

        #[inline(always)]
        unsafe fn gelu(self) -> Self {
            // SAFETY: the caller's promise, passed on.
            Zmm(unsafe { gelu::sixteen(self.0) })
        }

        #[inline(always)]
        unsafe fn all(value: f32) -> Self {
            // SAFETY: the caller's promise, passed on.
            Zmm(unsafe { _mm512_set1_ps(value) })
        }

        #[inline(always)]
        unsafe fn add_product(self, a: Self, b: Self) -> Self {
            // SAFETY: the caller's promise, passed on.
            Zmm(unsafe { _mm512_fmadd_ps(a.0, b.0, self.0) })
        }

        #[inline(always)]
        unsafe fn rounded(self) -> Self {
            // SAFETY: the caller's promise, passed on.
            unsafe {
                let bits = _mm512_slli_epi32::<16>(pairs::rounded(self.0));
                Zmm(_mm512_castsi512_ps(bits))
            }
        }

        #[inline(always)]
        unsafe fn total(self) -> f32 {
            // SAFETY: the caller's promise, passed on.
            unsafe { _mm512_reduce_add_ps(self.0) }
        }
    }
}
