//! Element types that kernels compute with.

use half::bf16;
pub use lockstep_types::{Dtype, Element};

/// A floating-point element. Arithmetic is done in f32; only storage is narrower.
pub trait Float: Element {
    fn as_f32(self) -> f32;
    /// Rounds to nearest, ties to even. A NaN stays a NaN.
    fn round_from(x: f32) -> Self;
}

impl Float for f32 {
    #[inline(always)]
    fn as_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn round_from(x: f32) -> f32 {
        x
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn as_f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }

    /// Has no branches, unlike `bf16::from_f32`, so that loops vectorize.
    #[inline(always)]
    fn round_from(x: f32) -> bf16 {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // Rounding could carry a NaN's payload into infinity; setting the quiet bit prevents that.
        let quiet = (bits >> 16) | 0x40;
        bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_matches_the_half_crate() {
        let mut bits = 0u32;
        for _ in 0..1_000_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(bits);
            let (ours, theirs) = (<bf16 as Float>::round_from(x), bf16::from_f32(x));
            assert!(
                ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                "{bits:#x}"
            );
            assert!(ours.as_f32() == ours.to_f32() || ours.is_nan());
        }
    }
}
