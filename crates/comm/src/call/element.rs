//! The number types that travel between ranks, and their bytes.
//! Never computes with them: see `fold`.

use half::{bf16, f16};

/// Element type of a buffer, as it is written in call headers and tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum DType {
    F32 = 1,
    F64,
    F16,
    Bf16,
    I32,
    I64,
    U8,
}

impl DType {
    pub const ALL: [DType; 7] =
        [DType::F32, DType::F64, DType::F16, DType::Bf16, DType::I32, DType::I64, DType::U8];

    pub fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::Bf16 => 2,
            DType::U8 => 1,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<DType> {
        DType::ALL.into_iter().find(|d| *d as u8 == code)
    }
}

impl std::str::FromStr for DType {
    type Err = String;

    fn from_str(s: &str) -> Result<DType, String> {
        DType::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| {
            let names: Vec<_> = DType::ALL.iter().map(|d| d.name()).collect();
            format!("unknown type {s}; one of {}", names.join(", "))
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A plain number: any bit pattern is a value, and it has no padding.
/// Sealed, because reading one from a peer's bytes relies on exactly that.
pub trait Element:
    Copy + Send + Sync + Default + PartialEq + std::fmt::Debug + sealed::Sealed + 'static
{
    const DTYPE: DType;
}

macro_rules! elements {
    ($($t:ty => $d:ident),*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$d;
        }
    )*};
}
elements!(f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16, i32 => I32, i64 => I64, u8 => U8);

/// The bytes of a slice of numbers.
pub fn bytes_of<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: an Element has no padding, so each of its bytes is initialised; u8 needs no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of a slice of numbers, to be written.
pub fn bytes_of_mut<T: Element>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and any bytes written are valid values because every bit pattern is one.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}
