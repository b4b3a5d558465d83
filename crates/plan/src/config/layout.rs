//! `[layout]`: the parallel layout.

use super::Reader;
use crate::context::ContextKind;
use crate::schedule::ScheduleKind;
use serde::{Deserialize, Serialize};

/// `[layout]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Layout {
    /// Replicas; each processes its share of the global batch.
    pub data: Option<usize>,
    /// ZeRO level: which states are sharded across replicas.
    pub zero: Option<usize>,
    /// Ranks that states are sharded across; the shard is replicated on the other replicas (hybrid sharding).
    pub shard: Option<usize>,
    /// ZeRO-3: keep the gathered parameters for the backward pass.
    pub keep_gathered: Option<bool>,
    /// Shards of each matrix.
    pub tensor: Option<usize>,
    /// Sequence parallelism: tensor ranks also shard norms and residuals, by tokens.
    pub sequence: Option<bool>,
    /// Shards of each sequence.
    pub context: Option<usize>,
    pub context_kind: Option<ContextKind>,
    /// Pipeline ranks.
    pub pipe: Option<usize>,
    pub schedule: Option<ScheduleKind>,
    /// Pipeline stages per rank, for the interleaved schedule.
    pub chunks: Option<usize>,
    /// Ranks that experts are distributed over.
    pub expert: Option<usize>,
    pub recompute: Option<Recompute>,
    /// State that is stored in host memory.
    pub offload: Option<Offload>,
    /// Axes from outermost to innermost. Ranks of the innermost axis are adjacent.
    pub placement: Option<String>,
}

/// Activation recomputation in the backward pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Save everything on a GPU. On a CPU the same as `Cheap`, whose cost is lost next to that of the multiplies.
    #[default]
    None,
    /// Recompute norms and activation functions, which are cheap.
    Cheap,
    /// Also recompute the inner activations of the feed-forward: saves most of the memory for 1/9 of the compute.
    Selective,
    /// Recompute each block from its input.
    Full,
}

/// State that is stored in page-locked host memory instead of device memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Offload {
    #[default]
    #[serde(rename = "none")]
    None,
    /// Master weights and moments. AdamW runs on the host's cores, overlapped with the next forward pass.
    #[serde(rename = "optimizer")]
    Optimizer,
    /// Also gradients: they are copied to the host during the backward pass.
    #[serde(rename = "optimizer+gradients")]
    OptimizerGradients,
    /// Activations saved for backward: they are copied to the host after a layer's forward pass, and back ahead of its
    /// backward pass.
    #[serde(rename = "activations")]
    Activations,
    /// Optimizer, gradients and activations.
    #[serde(rename = "all")]
    All,
}

impl Offload {
    /// The values as they are typed.
    pub const NAMES: [(&str, Offload); 5] = [
        ("none", Offload::None),
        ("optimizer", Offload::Optimizer),
        ("optimizer+gradients", Offload::OptimizerGradients),
        ("activations", Offload::Activations),
        ("all", Offload::All),
    ];

    pub fn name(self) -> &'static str {
        Offload::NAMES[self as usize].0
    }

    /// Whether master weights and moments are in host memory.
    pub fn optimizer(self) -> bool {
        !matches!(self, Offload::None | Offload::Activations)
    }

    /// Whether gradients leave the device as soon as they are final.
    pub fn gradients(self) -> bool {
        matches!(self, Offload::OptimizerGradients | Offload::All)
    }

    /// Whether saved activations are in host memory between the passes of a layer.
    pub fn activations(self) -> bool {
        matches!(self, Offload::Activations | Offload::All)
    }
}

const RECOMPUTES: [(&str, Recompute); 4] = [
    ("none", Recompute::None),
    ("cheap", Recompute::Cheap),
    ("selective", Recompute::Selective),
    ("full", Recompute::Full),
];

impl Recompute {
    /// Whether the hidden values of the feed-forward before the activation function are saved.
    pub fn saves_hidden(self) -> bool {
        matches!(self, Recompute::None | Recompute::Cheap)
    }
}

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
            offload: reader.word("layout.offload", &Offload::NAMES),
            placement: reader.text("layout.placement"),
        }
    }

    /// Number of ranks: the product of the degrees.
    pub fn ranks(&self) -> usize {
        [self.data, self.tensor, self.context, self.pipe]
            .into_iter()
            .fold(1, |ranks, degree| ranks.saturating_mul(degree.unwrap_or(1).max(1)))
    }
}
