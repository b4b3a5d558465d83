//! `[layout]`: how the ranks share the work.

use super::Reader;
use crate::context::ContextKind;
use crate::schedule::ScheduleKind;
use serde::{Deserialize, Serialize};

/// `[layout]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Layout {
    /// Replicas, each on its share of the global batch.
    pub data: Option<usize>,
    /// ZeRO's stage: what of the replicas' states is cut among them.
    pub zero: Option<usize>,
    /// Ranks among which it is cut; the rest hold copies (hybrid sharding).
    pub shard: Option<usize>,
    /// Whether ZeRO-3 keeps what it gathered for the forward pass.
    pub keep_gathered: Option<bool>,
    /// Pieces of each matrix.
    pub tensor: Option<usize>,
    /// Whether ranks of the tensor axis cut norms and residuals too, by tokens.
    pub sequence: Option<bool>,
    /// Pieces of each sequence.
    pub context: Option<usize>,
    pub context_kind: Option<ContextKind>,
    /// Stages of the model.
    pub pipe: Option<usize>,
    pub schedule: Option<ScheduleKind>,
    /// Stages of each rank, when they are interleaved.
    pub chunks: Option<usize>,
    /// Ranks among which experts are dealt out.
    pub expert: Option<usize>,
    pub recompute: Option<Recompute>,
    /// The axes from the outermost to the innermost, whose ranks are neighbours.
    pub placement: Option<String>,
}

/// What the backward pass computes again instead of keeping it from the forward pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Only what is cheap: norms and activation functions.
    #[default]
    None,
    /// The wide inner part of the feed-forward too: most of the memory for a ninth of the work.
    Selective,
    /// Each block from its input.
    Full,
}

const RECOMPUTES: [(&str, Recompute); 3] =
    [("none", Recompute::None), ("selective", Recompute::Selective), ("full", Recompute::Full)];

const CONTEXTS: [(&str, ContextKind); 3] =
    [("ring", ContextKind::Ring), ("ulysses", ContextKind::Ulysses), ("both", ContextKind::Both)];

impl Layout {
    pub(super) fn read(reader: &mut Reader) -> Layout {
        Layout {
            data: reader.count("layout.data"),
            zero: reader.count("layout.zero"),
            shard: reader.count("layout.shard"),
            keep_gathered: reader.flag("layout.keep_gathered"),
            tensor: reader.count("layout.tensor"),
            sequence: reader.flag("layout.sequence"),
            context: reader.count("layout.context"),
            context_kind: reader.word("layout.context_kind", &CONTEXTS),
            pipe: reader.count("layout.pipe"),
            schedule: reader
                .word("layout.schedule", &ScheduleKind::ALL.map(|kind| (kind.name(), kind))),
            chunks: reader.count("layout.chunks"),
            expert: reader.count("layout.expert"),
            recompute: reader.word("layout.recompute", &RECOMPUTES),
            placement: reader.text("layout.placement"),
        }
    }

    /// The ranks that the typed degrees need.
    pub fn ranks(&self) -> usize {
        [self.data, self.tensor, self.context, self.pipe]
            .into_iter()
            .fold(1, |ranks, degree| ranks.saturating_mul(degree.unwrap_or(1).max(1)))
    }
}
