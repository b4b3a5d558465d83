//! Bytes of a rank by what they are for, stage by stage, before anything is allocated.

mod activations;
mod states;

pub use states::states;

use lockstep_plan::schedule::Kind;
use serde::{Deserialize, Serialize};

use crate::case::Case;
use activations::{kept, layer_inside, working};
use states::held;

/// Bytes on one rank.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Memory {
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

impl Memory {
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

/// What a rank of the pipeline needs.
pub(crate) fn memory(case: &Case, pipe: usize) -> Memory {
    let software = case.software();
    let layers = |chunk: usize| case.layers(chunk * case.pipe() + pipe) as f64;
    let most = (0..case.layout().chunks).map(layers).fold(0.0, f64::max);
    let passes =
        in_flight(case.layout().schedule, case.pipe(), case.layout().chunks, case.micros(), pipe);
    let last = pipe + 1 == case.pipe();
    let logits = if last { case.tokens * case.vocab * software.logits[0] } else { 0.0 };
    let mut memory = Memory {
        activations: passes * most * kept(case),
        logits,
        working: working(case) + layer_inside(case),
        reserve: case.cluster.accelerator.reserve_gib * crate::cluster::GIB,
        ..held(case, pipe)
    };
    memory.slack = software.slack * memory.allocated();
    memory
}

/// Passes of a stage that are begun and not done, at most: those of `Schedule::in_flight`, by formula.
pub(crate) fn in_flight(
    kind: Kind,
    ranks: usize,
    chunks: usize,
    micros: usize,
    rank: usize,
) -> f64 {
    let most = match kind {
        Kind::Gpipe => micros,
        _ if ranks == 1 => 1,
        Kind::OneForwardOneBackward => (ranks - rank).min(micros),
        Kind::Interleaved => {
            (2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1).min(chunks * micros)
        }
        Kind::ZbH1 => ranks.min(micros),
        Kind::ZbH2 => (2 * ranks - 1).min(micros),
    };
    most as f64
}
