//! Element types of tensors.

use half::bf16;

/// Element type of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Dtype {
    F32,
    Bf16,
    /// Token ids and other indices.
    U32,
}

impl Dtype {
    /// Bytes per element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 | Dtype::U32 => 4,
            Dtype::Bf16 => 2,
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::U32 => "u32",
        })
    }
}

/// A Rust type that a tensor can hold.
///
/// # Safety
/// The type must have `DTYPE.bytes()` bytes, and every bit pattern must be a valid value.
pub unsafe trait Element: Copy + Send + Sync + Default + std::fmt::Debug + 'static {
    const DTYPE: Dtype;
}

// SAFETY: four bytes, every bit pattern is valid.
unsafe impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}
// SAFETY: two bytes, every bit pattern is valid.
unsafe impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}
// SAFETY: four bytes, every bit pattern is valid.
unsafe impl Element for u32 {
    const DTYPE: Dtype = Dtype::U32;
}

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
