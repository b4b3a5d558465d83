//! Rows that one thread parsed.

use std::collections::BTreeMap;

use crate::data::number;
use crate::data::table::{Store, Values};

/// Consecutive rows of a file.
pub(crate) struct Piece {
    pub rows: usize,
    pub values: Values,
    pub label: Vec<f32>,
    pub weight: Vec<f32>,
    pub group: Vec<u64>,
    /// For each categorical feature, the words of its values.
    pub words: BTreeMap<usize, Vec<Vec<u8>>>,
}

impl Default for Piece {
    fn default() -> Piece {
        Piece {
            rows: 0,
            values: Values::Columns { store: Store::Memory(Vec::new()), first: 0 },
            label: Vec::new(),
            weight: Vec::new(),
            group: Vec::new(),
            words: BTreeMap::new(),
        }
    }
}

/// Parses a label, which must be finite.
pub(crate) fn label(text: &[u8]) -> Result<f32, String> {
    match number::parse(text).map(|value| value as f32) {
        Some(value) if value.is_finite() => Ok(value),
        _ => Err(format!("the label {:?} is not a finite number", String::from_utf8_lossy(text))),
    }
}

/// Parses a weight, which must be finite and not negative.
pub(crate) fn weight(text: &[u8]) -> Result<f32, String> {
    match number::parse(text).map(|value| value as f32) {
        Some(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err(format!(
            "the weight {:?} is not a finite number of at least 0",
            String::from_utf8_lossy(text)
        )),
    }
}

/// Identifies a group by its text.
pub(crate) fn group_id(text: &[u8]) -> u64 {
    let hash = blake3::hash(text);
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("eight bytes"))
}
