//! How much memory a rank needs, by what it is for, before anything is allocated. What each line counts is
//! walked through moment by moment, as a step does it. Counts only what outlives an operation: working
//! buffers are not in it, but for the blocks that ZeRO-3 gathers.
//!
//! | line | exact | otherwise |
//! |---|---|---|
//! | parameters, optimizer | always | |
//! | gradients | where sums are waited for | the most, where they go on beside the computing |
//! | activations | dense models; experts without capacity that are all here | experts evenly used, none dropped but for want of room |
//! | gathered | | the most |

mod activations;
mod gathered;
mod gradients;

use crate::model::Part;
use crate::passes::moments;
use crate::plan::Plan;
use lockstep_types::Dtype;
use serde::{Deserialize, Serialize};

/// Bytes on one rank, each line at its largest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ledger {
    /// f32 masters, and what is computed with where that is something else: whole below ZeRO-3.
    pub parameters: usize,
    /// Of blocks whose sum is still to come all of it, of the others what this rank keeps.
    pub gradients: usize,
    /// Two f32 moments of what this rank steps.
    pub optimizer: usize,
    /// What blocks keep for their backward passes, of all micro-batches that are under way.
    pub activations: usize,
    /// Blocks that ZeRO-3 has together for the moment: one, or where it gathers ahead two neighbours.
    pub gathered: usize,
}

impl Ledger {
    /// Of one of a plan's ranks. Where the plan does not say whether exchanges go on beside the computing, as
    /// where they do not: on one host.
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
        let moments = moments(plan, &part);
        let (all, own) = (part.len(), own(&part));
        Ledger {
            parameters: parameters(plan, all, own),
            gradients: gradients::peak(plan, &part, &moments),
            optimizer: 8 * own,
            activations: activations::peak(plan, &part, &moments),
            gathered: gathered::peak(plan, &part, &moments),
        }
    }

    /// All of it, as if everything were at its largest at once.
    pub fn total(&self) -> usize {
        let Ledger { parameters, gradients, optimizer, activations, gathered } = self;
        parameters + gradients + optimizer + activations + gathered
    }
}

/// Of `all` parameters on a rank, of which it steps its `own`.
fn parameters(plan: &Plan, all: usize, own: usize) -> usize {
    let wide = plan.precision.compute == Dtype::F32;
    let bytes = plan.precision.compute.bytes();
    match (plan.layout.zero, wide) {
        // The masters are what is computed with.
        (0..3, true) => 4 * all,
        (0..3, false) => bytes * all + 4 * own,
        (_, true) => 4 * own,
        (_, false) => (bytes + 4) * own,
    }
}

/// Parameters that a rank steps.
fn own(part: &Part) -> usize {
    part.shards.iter().flatten().map(|shard| shard.own.len()).sum()
}

/// Bytes held now, and at most.
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
        assert!(bytes <= self.now, "{bytes} bytes are given back of {}", self.now);
        self.now -= bytes;
    }
}

/// Whether exchanges of gradients and parameters go on beside the computing.
fn overlaps(plan: &Plan) -> bool {
    plan.comm.overlap.data && plan.mesh().replicas() > 1
}
