//! Bytes of a rank by what they are for, stage by stage, before anything is allocated.

mod activations;
mod states;

pub use states::states;

use lockstep_plan::schedule::ScheduleKind;
use lockstep_plan::{Coord, Ledger, Plan};
use serde::{Deserialize, Serialize};

use crate::case::Case;
use crate::cluster::Cluster;
use crate::estimate::Options;
pub(crate) use activations::Layers;
use states::held;

/// Bytes on one rank.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct MemoryEstimate {
    /// Weights that are computed with.
    pub parameters: f64,
    pub gradients: f64,
    /// Masters and moments.
    pub optimizer: f64,
    /// What layers keep, of all micro-batches that are under way.
    pub activations: f64,
    /// Blocks that ZeRO-3 has together for the moment.
    pub gathered: f64,
    /// Of the loss.
    pub logits: f64,
    /// What a backward pass has for a moment: a layer that is computed again, gradients of activations.
    pub working: f64,
    /// Buckets, messages, and what libraries keep for exchanges.
    pub buffers: f64,
    /// What the allocator cannot give out again.
    pub slack: f64,
    /// Taken before any tensor.
    pub reserve: f64,
}

impl MemoryEstimate {
    /// What tensors take at most: what frameworks report as allocated.
    pub fn allocated(&self) -> f64 {
        self.states() + self.activations + self.gathered + self.logits + self.working + self.buffers
    }

    pub fn states(&self) -> f64 {
        self.parameters + self.gradients + self.optimizer
    }

    /// All that the device must have.
    pub fn total(&self) -> f64 {
        self.allocated() + self.slack + self.reserve
    }
}

/// What a rank of the pipeline needs, by rank: cheaper to know than a whole estimate.
pub fn memories(plan: &Plan, cluster: &Cluster, options: &Options) -> Vec<MemoryEstimate> {
    let cluster = &*cluster.shared(plan.ranks, plan.train.threads);
    let case = Case::new(plan, cluster, options);
    (0..case.pipe()).map(|pipe| memory(&case, pipe)).collect()
}

/// What a rank of the pipeline needs.
pub(crate) fn memory(case: &Case, pipe: usize) -> MemoryEstimate {
    let by_formula = by_formula(case, &Layers::of(case), pipe);
    if !case.options.exact || case.shape().planned_only().is_some() {
        return by_formula;
    }
    // As the plan counts it, block by block; the first of the stage's ranks has the largest pieces.
    let first = Coord { pipe, data: 0, context: 0, tensor: 0 };
    let ledger = Ledger::of(case.plan, case.mesh.rank(first));
    let exact = MemoryEstimate {
        parameters: ledger.parameters as f64,
        gradients: ledger.gradients as f64,
        optimizer: ledger.optimizer as f64,
        activations: ledger.activations as f64,
        gathered: ledger.gathered as f64,
        // A layer that is computed again is among the activations there, and a block's whole gradient among them.
        working: activations::working(case),
        buffers: case.software().buffers_gib * crate::cluster::GIB,
        ..by_formula
    };
    MemoryEstimate { slack: case.software().slack * exact.allocated(), ..exact }
}

/// The same by formula, of layers that are known.
pub(crate) fn by_formula(case: &Case, layers: &Layers, pipe: usize) -> MemoryEstimate {
    let software = case.software();
    // Passes in flight are spread over the chunks.
    let chunks = case.layout().chunks;
    let mut kinds = [0.0; 2];
    for chunk in 0..chunks {
        let more = case.kinds(chunk * case.pipe() + pipe);
        kinds = [0, 1].map(|kind| kinds[kind] + more[kind] as f64 / chunks as f64);
    }
    let each = |bytes: [f64; 2]| kinds[0] * bytes[0] + kinds[1] * bytes[1];
    let [begun, put_off] =
        in_flight(case.layout().schedule, case.pipe(), chunks, case.micros(), pipe);
    let last = pipe + 1 == case.pipe();
    let logits = if last { case.tokens * case.vocab * software.logits[0] } else { 0.0 };
    let mut memory = MemoryEstimate {
        activations: begun * each(layers.kept) + put_off * each(layers.put_off),
        logits,
        working: layers.working,
        reserve: case.cluster.accelerator.reserve_gib * crate::cluster::GIB,
        ..held(case, pipe)
    };
    memory.slack = software.slack * memory.allocated();
    memory
}

/// Passes of a stage that are begun and not done, at most, by formula: those whose input gradient is to come, as
/// `Schedule::in_flight` counts them, and those whose weight gradient was put off.
pub(crate) fn in_flight(
    kind: ScheduleKind,
    ranks: usize,
    chunks: usize,
    micros: usize,
    rank: usize,
) -> [f64; 2] {
    let thin = 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1;
    let (begun, put_off) = match kind {
        _ if ranks == 1 => (1, 0),
        ScheduleKind::Gpipe => (micros, 0),
        ScheduleKind::OneForwardOneBackward => ((ranks - rank).min(micros), 0),
        ScheduleKind::Interleaved => (thin.min(chunks * micros), 0),
        ScheduleKind::ZbH1 => ((ranks - rank).min(micros), rank),
        ScheduleKind::ZbH2 => ((2 * (ranks - rank) - 1).min(micros), 2 * rank),
    };
    [begun as f64, put_off.min(micros.saturating_sub(begun)) as f64]
}
