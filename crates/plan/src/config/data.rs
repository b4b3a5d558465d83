//! `[data]`: the training data.

use super::Reader;

/// `[data]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Data {
    /// `builtin:grammar`, or the path of a token file.
    pub source: Option<String>,
    /// Tokens per training sequence.
    pub seq: Option<usize>,
    /// Fraction of the data reserved for evaluation.
    pub held_out: Option<f64>,
    /// Number of corrupt samples that are skipped before the run stops.
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
