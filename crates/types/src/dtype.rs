//! Element types of tensors and messages, and their bytes.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// Element type of a tensor or a message.
///
/// The discriminants are part of the wire format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Dtype {
    #[default]
    F32 = 1,
    F64,
    F16,
    Bf16,
    I32,
    I64,
    U8,
    /// Token ids and other indices.
    U32,
}

impl Dtype {
    pub const ALL: [Dtype; 8] = [
        Dtype::F32,
        Dtype::F64,
        Dtype::F16,
        Dtype::Bf16,
        Dtype::I32,
        Dtype::I64,
        Dtype::U8,
        Dtype::U32,
    ];

    /// Size of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F64 | Dtype::I64 => 8,
            Dtype::F32 | Dtype::I32 | Dtype::U32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::U8 => 1,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F64 => "f64",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::I32 => "i32",
            Dtype::I64 => "i64",
            Dtype::U8 => "u8",
            Dtype::U32 => "u32",
        }
    }

    /// Inverse of `dtype as u8`.
    pub fn from_code(code: u8) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|dtype| *dtype as u8 == code)
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Dtype {
    type Err = String;

    fn from_str(s: &str) -> Result<Dtype, String> {
        Dtype::ALL.into_iter().find(|dtype| dtype.name() == s).ok_or_else(|| {
            let names: Vec<_> = Dtype::ALL.iter().map(|dtype| dtype.name()).collect();
            format!("unknown dtype {s}; use one of {}", names.join(", "))
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// Rust type of a tensor or message element.
///
/// Every bit pattern is a valid value and there is no padding. The trait is sealed because unsafe code that
/// reinterprets bytes relies on this.
pub trait Element:
    Copy + Send + Sync + Default + PartialEq + std::fmt::Debug + sealed::Sealed + 'static
{
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($t:ty => $d:ident),*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: Dtype = Dtype::$d;
        }
    )*};
}
elements!(f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16, i32 => I32, i64 => I64, u8 => U8, u32 => U32);

/// Views a slice of elements as bytes.
pub fn bytes_of<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: an Element has no padding, so all of its bytes are initialized; u8 needs no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Views a slice of elements as writable bytes.
pub fn bytes_of_mut<T: Element>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above; every bit pattern that is written is a valid value.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_round_trip() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::from_code(dtype as u8), Some(dtype));
            assert_eq!(dtype.name().parse(), Ok(dtype));
        }
        assert_eq!(Dtype::from_code(0), None);
        assert_eq!(Dtype::from_code(9), None);
    }
}
