//! `[layout]`: how the ranks share the work.

use super::Reader;
use serde::{Deserialize, Serialize};

/// `[layout]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Layout {
    /// Replicas, each on its share of the global batch.
    pub data: Option<usize>,
    pub recompute: Option<Recompute>,
}

/// What the backward pass computes again instead of keeping it from the forward pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    None,
    /// What is large and cheap (Korthikanti et al.).
    Selective,
    /// Each block from its input.
    Full,
}

const RECOMPUTES: [(&str, Recompute); 3] =
    [("none", Recompute::None), ("selective", Recompute::Selective), ("full", Recompute::Full)];

/// Axes and options that run files have, with the values that leave them out.
const ABSENT: [(&str, &[&str]); 9] = [
    ("layout.tensor", &["1", "off"]),
    ("layout.sequence", &["false", "off"]),
    ("layout.context", &["1", "off"]),
    ("layout.context_kind", &["off"]),
    ("layout.pipe", &["1", "off"]),
    ("layout.schedule", &["off"]),
    ("layout.expert", &["1", "off"]),
    ("layout.zero", &["0", "off"]),
    ("layout.shard", &["1", "off"]),
];

impl Layout {
    pub(super) fn read(reader: &mut Reader) -> Layout {
        for (key, off) in ABSENT {
            reader.absent(key, off, "this build trains on the data axis only");
        }
        Layout {
            data: reader.count("layout.data"),
            recompute: reader.word("layout.recompute", &RECOMPUTES),
        }
    }
}
