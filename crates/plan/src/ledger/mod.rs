//! The memory of a rank by what it is for, before anything is allocated. Each line follows the passes and the reduction
//! policy through a step and reports the peak. Only memory that outlives an operation is counted: working buffers are
//! not, except for the blocks that ZeRO-3 gathers.
//!
//! | line | exact | otherwise |
//! |---|---|---|
//! | parameters, optimizer | always | |
//! | gradients | without overlap | upper bound |
//! | activations | dense models; experts without capacity that are all on this rank | experts evenly used, tokens dropped only for lack of capacity |
//! | gathered, compressor state, snapshot | always | |
//! | offloaded | as the same line on the device | |
//!
//! With `layout.offload` the lines above are those of the device, and `offloaded` is host memory.

mod activations;
mod gathered;
mod gradients;
mod snapshot;

pub use activations::keeps_cheap;

use crate::mesh::Coord;
use crate::model::Part;
use crate::plan::Plan;
use crate::reduction::{Event, Gather, RankReductions, events};
use lockstep_types::Dtype;
use serde::{Deserialize, Serialize};

/// Bytes on one rank, each line at its peak.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ledger {
    /// f32 masters, and a copy in the compute type if that is another one; whole below ZeRO-3.
    pub parameters: usize,
    /// Gradients that are not reduced yet, and this rank's shards of the others.
    pub gradients: usize,
    /// Two f32 moments for each parameter that this rank updates.
    pub optimizer: usize,
    /// Saved for the backward passes of all micro-batches in flight.
    pub activations: usize,
    /// Blocks that ZeRO-3 has gathered at the same time.
    pub gathered: usize,
    /// Residuals of gradient compression, and mean squares of top-k.
    #[serde(default)]
    pub compressor_state: usize,
    /// Copy of this rank's part of a checkpoint while it is written. In host memory, and reused by the next checkpoint.
    #[serde(default)]
    pub snapshot: usize,
    /// Host memory of what is offloaded.
    #[serde(default)]
    pub offloaded: Offloaded,
}

/// Bytes in host memory instead of device memory, each line at its peak.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Offloaded {
    /// f32 masters, and a copy in the compute type, if that is another one, on its way to the device.
    pub parameters: usize,
    /// Gradients of the parameters that this rank updates.
    pub gradients: usize,
    /// Two f32 moments for each parameter that this rank updates.
    pub optimizer: usize,
    /// Saved for backward by layers whose backward pass is not next.
    pub activations: usize,
}

impl Offloaded {
    pub fn total(&self) -> usize {
        self.parameters + self.gradients + self.optimizer + self.activations
    }

    /// The states of a rank that updates its `own` parameters.
    fn states(plan: &Plan, own: usize) -> Offloaded {
        if !plan.layout.offload.optimizer() {
            return Offloaded::default();
        }
        let copy = match plan.precision.compute {
            Dtype::F32 => 0,
            compute => compute.bytes(),
        };
        Offloaded {
            parameters: (4 + copy) * own,
            gradients: plan.precision.gradients.bytes() * own,
            optimizer: 8 * own,
            activations: 0,
        }
    }
}

impl Ledger {
    /// The ledger of one rank of a plan.
    ///
    /// ```
    /// use lockstep_plan::{Config, Ledger, Plan, Environment};
    ///
    /// let sets = ["layout.data=4", "layout.zero=1", "precision.compute=bf16", "model.vocab=512"];
    /// let plan = Plan::resolve(&Config::parse("", &sets.map(String::from)), &Environment::one_host(4, 1)).unwrap();
    /// let (ledger, params) = (Ledger::of(&plan, 0), plan.model.param_count());
    /// assert_eq!(ledger.parameters + ledger.optimizer, 2 * params + 12 * params / 4);
    /// ```
    pub fn of(plan: &Plan, rank: usize) -> Ledger {
        let part = plan.part(rank);
        let reductions = RankReductions::of(plan, &part);
        let events = events(plan, &part, &reductions, false);
        let passes = || {
            events.iter().filter_map(|event| match event {
                Event::Pass(pass) => Some(*pass),
                Event::State(_) => None,
            })
        };
        let (all, own) = (part.len(), owned(&part));
        let compressor_state = snapshot::compressor_state(plan, &part, &reductions);
        let (activations, host_activations) = activations::peaks(plan, &part, passes());
        let states = Offloaded::states(plan, own);
        Ledger {
            parameters: parameters(plan, reductions.policy.gather, all, own),
            gradients: gradients::peak(plan, &reductions, &events),
            optimizer: 8 * own - states.optimizer,
            activations,
            gathered: gathered::peak(plan, &part, &reductions, &events),
            compressor_state,
            snapshot: snapshot::snapshot(&part, compressor_state),
            offloaded: Offloaded { activations: host_activations, ..states },
        }
    }

    /// The ledger of the rank with the largest total. In large meshes only the first rank of each stage is looked at;
    /// the shards of others have at most a few elements more.
    pub fn largest(plan: &Plan) -> Ledger {
        const MOST_RANKS: usize = 64;
        let mesh = plan.mesh();
        let first = |rank: &usize| {
            let Coord { data, context, tensor, .. } = mesh.coord(*rank);
            (data, context, tensor) == (0, 0, 0)
        };
        let looked_at = (0..plan.ranks).filter(|rank| plan.ranks <= MOST_RANKS || first(rank));
        let ledgers = looked_at.map(|rank| Ledger::of(plan, rank));
        ledgers.max_by_key(Ledger::total).expect("a plan has a rank")
    }

    /// The sum of all lines, as if they peaked at the same time.
    pub fn total(&self) -> usize {
        self.least() + self.gradients.min(self.activations)
    }

    /// Bytes without which the rank cannot train and save: gradients grow while activations are freed, so the smaller
    /// one of them is not counted.
    pub fn least(&self) -> usize {
        let Ledger { parameters, gradients, optimizer, activations, .. } = self;
        let Ledger { gathered, compressor_state, snapshot, .. } = self;
        let states = parameters + optimizer + compressor_state;
        states + gathered + snapshot + gradients.max(activations)
    }
}

/// Bytes of `all` parameters on a rank that updates its `own`.
fn parameters(plan: &Plan, gather: Gather, all: usize, own: usize) -> usize {
    let bytes = plan.precision.compute.bytes();
    let copied = if gather.shards_parameters() { own } else { all };
    match plan.precision.compute {
        _ if plan.layout.offload.optimizer() => bytes * copied,
        // The masters are also the copy that is computed with.
        Dtype::F32 => 4 * copied,
        _ => bytes * copied + 4 * own,
    }
}

/// Parameters that a rank updates.
fn owned(part: &Part) -> usize {
    part.shards.iter().flatten().map(|shard| shard.own.len()).sum()
}

/// Bytes in use now, and their peak.
#[derive(Default)]
struct Usage {
    now: usize,
    peak: usize,
}

impl Usage {
    fn take(&mut self, bytes: usize) {
        self.now += bytes;
        self.peak = self.peak.max(self.now);
    }

    fn give(&mut self, bytes: usize) {
        assert!(bytes <= self.now, "{bytes} bytes are freed, but only {} are in use", self.now);
        self.now -= bytes;
    }
}
