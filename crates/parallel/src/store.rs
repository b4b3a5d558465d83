//! What a rank keeps of a model from step to step: its parameters, and their gradients on the way.

use std::time::Duration;

use lockstep_comm::Result;
use lockstep_kernels::{Device, Dtype};
use lockstep_plan::Compression;
use lockstep_plan::model::Part;

use crate::{Gradients, Groups, Reduction, Weights};

/// Parameters, gradients, and how these are summed.
pub struct Store {
    pub weights: Weights,
    pub gradients: Gradients,
    pub reduction: Reduction,
    /// Micro-batches of a step.
    micros: usize,
    /// Of each block, how many micro-batches' gradients are in.
    counts: Vec<usize>,
    /// Whether parts of several micro-batches may lie in one buffer, which then must not be given up before
    /// the last.
    mixed: bool,
    /// Whether gradients stay this rank's own.
    pub unsummed: bool,
}

impl Store {
    pub fn new(
        weights: Weights,
        gradients: Gradients,
        reduction: Reduction,
        micros: usize,
    ) -> Store {
        let counts = vec![0; weights.blocks()];
        Store { weights, gradients, reduction, micros, counts, mixed: false, unsummed: false }
    }

    /// A whole model with random parameters, to train without peers.
    pub fn alone(device: &Device, part: &Part, dtype: Dtype, seed: u64) -> Store {
        let weights = Weights::init(device, part, dtype, 0, seed);
        let gradients = Gradients::new(part, 0, 0, Dtype::F32);
        Store::new(weights, gradients, Reduction::new(false, Compression::None), 1)
    }

    /// For schedules that put gradients of weights off, so that those of several micro-batches are begun at
    /// once.
    pub fn mixed(mut self, yes: bool) -> Store {
        self.mixed = yes;
        self
    }

    /// One micro-batch's gradient of a block is complete.
    pub fn complete(&mut self, device: &Device, groups: &Groups, block: usize) {
        self.counts[block] += 1;
        let last = self.counts[block] == self.micros;
        if (last || !self.mixed) && !self.unsummed {
            self.reduction.complete(device, groups, &mut self.gradients, block, last);
        }
    }

    /// All micro-batches are through: gradients are summed over all ranks that have parts of them.
    pub fn finish(&mut self, device: &Device, groups: &Groups) -> Result<()> {
        self.reduction.finish(device, groups, &self.weights.layout, &mut self.gradients);
        self.counts.fill(0);
        groups.check()
    }

    /// Forgets the gradients.
    pub fn clear(&mut self) {
        self.reduction.abandon();
        self.gradients.clear();
        self.counts.fill(0);
    }

    /// Time spent on exchanging gradients instead of computing, since it was last asked.
    pub fn take_exposed(&mut self) -> Duration {
        std::mem::take(&mut self.reduction.exposed)
    }
}
