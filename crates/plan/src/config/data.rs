//! `[data]`: what is learned from.

use super::Reader;

/// `[data]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Data {
    /// `builtin:grammar`, or the path of a token file.
    pub source: Option<String>,
    /// Tokens of a training sequence.
    pub seq: Option<usize>,
    /// Fraction kept for evaluation.
    pub held_out: Option<f64>,
    /// Damaged samples that a run may leave out.
    pub max_corrupt: Option<usize>,
}

impl Data {
    pub(super) fn read(reader: &mut Reader) -> Data {
        Data {
            source: reader.text("data.source"),
            seq: reader.count("data.seq"),
            held_out: reader.number("data.held_out"),
            max_corrupt: reader.count("data.max_corrupt"),
        }
    }
}
