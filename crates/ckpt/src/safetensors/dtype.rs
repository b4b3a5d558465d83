//! Element types of the safetensors format, and their conversion from and to f32.

use half::{bf16, f16};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dtype {
    Bool,
    U8,
    I8,
    F8E4M3,
    F8E5M2,
    U16,
    I16,
    F16,
    Bf16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
}

use Dtype::*;

/// Each type with its name in the header and its size.
const ALL: [(Dtype, &str, usize); 15] = [
    (Bool, "BOOL", 1),
    (U8, "U8", 1),
    (I8, "I8", 1),
    (F8E4M3, "F8_E4M3", 1),
    (F8E5M2, "F8_E5M2", 1),
    (U16, "U16", 2),
    (I16, "I16", 2),
    (F16, "F16", 2),
    (Bf16, "BF16", 2),
    (U32, "U32", 4),
    (I32, "I32", 4),
    (F32, "F32", 4),
    (U64, "U64", 8),
    (I64, "I64", 8),
    (F64, "F64", 8),
];

impl Dtype {
    pub fn parse(name: &str) -> Option<Dtype> {
        ALL.iter().find(|(_, known, _)| *known == name).map(|(dtype, ..)| *dtype)
    }

    pub fn name(self) -> &'static str {
        ALL[self as usize].1
    }

    pub fn bytes(self) -> usize {
        ALL[self as usize].2
    }

    /// Whether every value fits in f32.
    pub fn fits_f32(self) -> bool {
        matches!(self, F32 | F16 | Bf16)
    }
}

/// Reads little-endian elements as f32.
///
/// # Panics
/// If the type does not fit in f32 or the lengths differ.
pub(super) fn decode(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * dtype.bytes(), "bytes and elements");
    match dtype {
        F32 => each(bytes, out, f32::from_le_bytes),
        F16 => each(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        Bf16 => each(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        _ => panic!("{} does not fit in f32", dtype.name()),
    }
}

/// Writes f32 as little-endian elements, rounded to nearest.
///
/// # Panics
/// If the type is not f32, f16 or bf16, or the lengths differ.
pub(super) fn encode(dtype: Dtype, values: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), values.len() * dtype.bytes(), "bytes and elements");
    match dtype {
        F32 => each_back(values, out, f32::to_le_bytes),
        F16 => each_back(values, out, |v| f16::from_f32(v).to_le_bytes()),
        Bf16 => each_back(values, out, |v| bf16::from_f32(v).to_le_bytes()),
        _ => panic!("f32 cannot be written as {}", dtype.name()),
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (out, element) in out.iter_mut().zip(elements) {
        *out = value(*element);
    }
}

fn each_back<const N: usize>(values: &[f32], out: &mut [u8], bytes: impl Fn(f32) -> [u8; N]) {
    let (elements, _) = out.as_chunks_mut::<N>();
    for (element, value) in elements.iter_mut().zip(values) {
        *element = bytes(*value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_order_matches_enum_order() {
        for (position, (dtype, name, _)) in ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, position, "{name}");
            assert_eq!(Dtype::parse(name), Some(dtype));
        }
    }

    #[test]
    fn float_types_round_trip() {
        let values = [0.0, -1.5, 1024.0, f32::INFINITY, -0.0078125];
        for dtype in [F32, F16, Bf16] {
            let mut bytes = vec![0; 5 * dtype.bytes()];
            encode(dtype, &values, &mut bytes);
            let mut back = [0.0; 5];
            decode(dtype, &bytes, &mut back);
            assert_eq!(back, values, "{}", dtype.name());
        }
    }
}
