//! A vector in plain Rust, for any target.

use super::{EXP2_COEFFICIENTS, HALF_ULP, MIN_EXPONENT, ROUNDER, Vector};

#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 8]);

impl Vector for Portable {
    const LANES: usize = 8;
    const MAX_ROWS: [usize; 5] = [0, 4, 2, 0, 0];

    #[inline(always)]
    unsafe fn splat(x: f32) -> Portable {
        Portable([x; 8])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Portable {
        // SAFETY: the trait requires eight elements.
        Portable(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the trait requires eight elements.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Portable) -> Portable {
        Portable(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }
    #[inline(always)]
    unsafe fn sub(self, other: Portable) -> Portable {
        Portable(std::array::from_fn(|i| self.0[i] - other.0[i]))
    }
    #[inline(always)]
    unsafe fn mul(self, other: Portable) -> Portable {
        Portable(std::array::from_fn(|i| self.0[i] * other.0[i]))
    }
    #[inline(always)]
    unsafe fn mul_add(self, by: Portable, plus: Portable) -> Portable {
        // On targets without a fused instruction, `f32::mul_add` is a library call.
        match cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
            true => Portable(std::array::from_fn(|i| self.0[i].mul_add(by.0[i], plus.0[i]))),
            false => Portable(std::array::from_fn(|i| self.0[i] * by.0[i] + plus.0[i])),
        }
    }
    #[inline(always)]
    unsafe fn max(self, other: Portable) -> Portable {
        Portable(std::array::from_fn(
            |i| if self.0[i] > other.0[i] { self.0[i] } else { other.0[i] },
        ))
    }
    #[inline(always)]
    unsafe fn exp2(self) -> Portable {
        Portable(std::array::from_fn(|i| {
            let x = self.0[i];
            let shifted = x + ROUNDER;
            let fraction = x - (shifted - ROUNDER);
            let mut power = EXP2_COEFFICIENTS[6];
            for c in EXP2_COEFFICIENTS[..6].iter().rev() {
                power = power * fraction + c;
            }
            let scaled = f32::from_bits(power.to_bits().wrapping_add(shifted.to_bits() << 23));
            // Both comparisons are false for NaN, which stays NaN.
            if x < MIN_EXPONENT {
                0.0
            } else if x >= MIN_EXPONENT {
                scaled
            } else {
                x
            }
        }))
    }
    #[inline(always)]
    unsafe fn select_ge(self, least: f32, yes: Portable, no: Portable) -> Portable {
        Portable(std::array::from_fn(|i| if self.0[i] >= least { yes.0[i] } else { no.0[i] }))
    }
    #[inline(always)]
    unsafe fn bf16_pair(low: Portable, high: Portable) -> Portable {
        Portable(std::array::from_fn(|i| {
            f32::from_bits(
                u32::from(to_bf16_bits(low.0[i])) | u32::from(to_bf16_bits(high.0[i])) << 16,
            )
        }))
    }
    #[inline(always)]
    unsafe fn store_bf16(first: Portable, second: Portable, to: *mut u16) {
        let halves: [[u16; 8]; 2] = [first.0.map(to_bf16_bits), second.0.map(to_bf16_bits)];
        // SAFETY: the trait requires sixteen elements.
        unsafe { to.cast::<[[u16; 8]; 2]>().write_unaligned(halves) }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        for i in 0..8 {
            for j in 0..8 {
                // SAFETY: the trait requires both squares.
                unsafe { *to.add(j * to_stride + i) = *from.add(i * from_stride + j) };
            }
        }
    }
}

#[inline(always)]
fn to_bf16_bits(x: f32) -> u16 {
    (x.to_bits().wrapping_add(HALF_ULP) >> 16) as u16
}
