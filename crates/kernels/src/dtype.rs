//! What a tensor's elements are.

use half::bf16;

/// What the elements of a tensor are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Dtype {
    F32,
    Bf16,
    /// Token ids and other indices.
    U32,
}

impl Dtype {
    /// Of an element.
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
/// Every bit pattern must be a value of the type, of `DTYPE.bytes()` bytes.
pub unsafe trait Element: Copy + Send + Sync + Default + std::fmt::Debug + 'static {
    const DTYPE: Dtype;
}

// SAFETY: four bytes, all patterns are values.
unsafe impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}
// SAFETY: two bytes, all patterns are values.
unsafe impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}
// SAFETY: four bytes, all patterns are values.
unsafe impl Element for u32 {
    const DTYPE: Dtype = Dtype::U32;
}

/// An element that is a number to compute with. Computing is done in f32 whatever is stored.
pub trait Float: Element {
    fn wide(self) -> f32;
    fn narrow(wide: f32) -> Self;
}

impl Float for f32 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(wide: f32) -> f32 {
        wide
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }

    /// Rounds to nearest, ties to even; a NaN stays a NaN. Without branches, so that loops of it vectorise.
    #[inline(always)]
    fn narrow(wide: f32) -> bf16 {
        let bits = wide.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // Rounding could carry a NaN's payload into infinity; a quiet bit keeps it what it is.
        let quiet = (bits >> 16) | 0x40;
        bf16::from_bits(if wide.is_nan() { quiet } else { rounded } as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        let mut bits = 0u32;
        for _ in 0..1_000_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let wide = f32::from_bits(bits);
            let (ours, theirs) = (<bf16 as Float>::narrow(wide), bf16::from_f32(wide));
            assert!(
                ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                "{bits:#x}"
            );
            assert!(ours.wide() == ours.to_f32() || ours.is_nan());
        }
    }
}
