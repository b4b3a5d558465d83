//! Predicted memory of a rank by purpose.

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
use states::{fixed_buffers, snapshot, states_of_rank};

/// Memory of one rank, in bytes.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct MemoryEstimate {
    /// Working weights.
    pub parameters: f64,
    pub gradients: f64,
    /// Master weights and moments.
    pub optimizer: f64,
    /// Activations saved for backward, of all micro-batches in flight.
    pub activations: f64,
    /// Blocks gathered by ZeRO-3.
    pub gathered: f64,
    pub logits: f64,
    /// Temporary memory of a backward pass: a recomputed layer, activation gradients.
    pub working: f64,
    /// Buckets, messages and buffers of communication libraries.
    pub buffers: f64,
    /// Fragmentation of the allocator.
    pub slack: f64,
    /// Memory used before any tensor.
    pub reserve: f64,
    /// Copy of a checkpoint while it is written, where ranks compute in host memory.
    pub snapshot: f64,
    /// Host memory of offloaded state, where ranks compute in other memory. Not part of the total.
    #[serde(default)]
    pub host: f64,
}

impl MemoryEstimate {
    /// Peak of allocated tensors, as frameworks report it.
    pub fn allocated(&self) -> f64 {
        self.states() + self.activations + self.gathered + self.logits + self.working + self.buffers
    }

    pub fn states(&self) -> f64 {
        self.parameters + self.gradients + self.optimizer
    }

    /// Memory that the device needs.
    pub fn total(&self) -> f64 {
        self.allocated() + self.slack + self.reserve + self.snapshot
    }
}

/// Memory of every pipeline rank. Cheaper than a whole estimate.
pub fn memories(plan: &Plan, cluster: &Cluster, options: &Options) -> Vec<MemoryEstimate> {
    let cluster = &*cluster.for_rank(plan.ranks, plan);
    let case = Case::new(plan, cluster, options);
    (0..case.pipe()).map(|pipe| memory(&case, pipe)).collect()
}

/// Memory of a pipeline rank.
pub(crate) fn memory(case: &Case, pipe: usize) -> MemoryEstimate {
    let by_formula = by_formula(case, &Layers::of(case), pipe);
    if !case.options.exact || case.shape().planned_only().is_some() {
        return by_formula;
    }
    // From the plan's ledger. The first rank of the stage has the largest shards.
    let first = Coord { pipe, data: 0, context: 0, tensor: 0 };
    let ledger = Ledger::of(case.plan, case.mesh.rank(first));
    let exact = MemoryEstimate {
        parameters: ledger.parameters as f64,
        gradients: ledger.gradients as f64,
        optimizer: ledger.optimizer as f64,
        activations: ledger.activations as f64,
        gathered: ledger.gathered as f64,
        // The ledger counts a recomputed layer and the full gradient of a block as activations.
        working: activations::working(case),
        buffers: fixed_buffers(case, pipe) + ledger.compressor_state as f64,
        host: match case.cluster.cores {
            Some(_) => 0.0,
            None => ledger.offloaded.total() as f64,
        },
        snapshot: match case.cluster.cores {
            Some(_) => (ledger.snapshot + ledger.offloaded.total()) as f64,
            None => 0.0,
        },
        ..by_formula
    };
    MemoryEstimate { slack: case.software().slack * exact.allocated(), ..exact }
}

/// Memory of a pipeline rank by formula.
pub(crate) fn by_formula(case: &Case, layers: &Layers, pipe: usize) -> MemoryEstimate {
    let software = case.software();
    // Passes in flight are distributed over the chunks.
    let chunks = case.layout().chunks;
    let mut kinds = [0.0; 2];
    for chunk in 0..chunks {
        let more = case.kinds(chunk * case.pipe() + pipe);
        kinds = [0, 1].map(|kind| kinds[kind] + more[kind] as f64 / chunks as f64);
    }
    let each = |bytes: [f64; 2]| kinds[0] * bytes[0] + kinds[1] * bytes[1];
    let [saved, deferred] =
        in_flight(case.layout().schedule, case.pipe(), chunks, case.micros(), pipe);
    let last = pipe + 1 == case.pipe();
    let logits = if last { case.tokens * case.vocab * software.logits[0] } else { 0.0 };
    // A layer that is computed, one that is copied, and one that stays.
    let resident = match case.offloads().activations() {
        true => (3.0 / (kinds[0] + kinds[1])).min(1.0),
        false => 1.0,
    };
    let mut memory = MemoryEstimate {
        activations: resident * saved * each(layers.saved) + deferred * each(layers.deferred),
        logits,
        working: layers.working,
        reserve: case.cluster.accelerator.reserve_gib * crate::cluster::GIB,
        snapshot: snapshot(case, pipe),
        ..states_of_rank(case, pipe)
    };
    memory.host += (1.0 - resident) * saved * each(layers.saved);
    memory.slack = software.slack * memory.allocated();
    memory
}

/// Maximum number of micro-batches in flight on a stage: those that wait for their input gradient, as
/// `Schedule::in_flight` counts them, and those with a deferred weight gradient.
pub(crate) fn in_flight(
    kind: ScheduleKind,
    ranks: usize,
    chunks: usize,
    micros: usize,
    rank: usize,
) -> [f64; 2] {
    let thin = 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1;
    let (saved, deferred) = match kind {
        _ if ranks == 1 => (1, 0),
        ScheduleKind::Gpipe => (micros, 0),
        ScheduleKind::OneForwardOneBackward => ((ranks - rank).min(micros), 0),
        ScheduleKind::Interleaved => (thin.min(chunks * micros), 0),
        ScheduleKind::ZbH1 => ((ranks - rank).min(micros), rank),
        ScheduleKind::ZbH2 => ((2 * (ranks - rank) - 1).min(micros), 2 * rank),
    };
    [saved as f64, deferred.min(micros.saturating_sub(saved)) as f64]
}
