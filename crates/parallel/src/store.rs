//! The parameters and gradients of a rank, and the executor of its reduction policy.

use std::sync::{Arc, Mutex};

use lockstep_comm::Result;
use lockstep_kernels::{Device, Dtype};
use lockstep_plan::Compression;
use lockstep_plan::model::Part;
use lockstep_plan::reduction::{Gather, PolicyInputs, RankReductions, ReductionPolicy, StateOp};

use crate::{Gradients, Groups, Reduction, SharedHostGradients, Storage, Weights};

/// Parameters, gradients, and the reductions between them.
pub struct Store {
    pub weights: Weights,
    pub gradients: Gradients,
    pub reduction: Reduction,
    /// By block, micro-batches whose gradient is complete.
    counts: Vec<usize>,
    /// Gradients stay local: nothing is reduced.
    pub unsummed: bool,
    /// With an optimizer in host memory.
    pub host_gradients: Option<SharedHostGradients>,
}

/// How a [`Store`] keeps and reduces gradients.
pub struct StoreOptions {
    pub reductions: RankReductions,
    /// Element type of the gradients.
    pub gradients: Dtype,
    pub compression: Compression,
}

/// The gathers, releases and reductions that a store has started, in order.
pub type StateLog = Arc<Mutex<Vec<StateOp>>>;

impl Store {
    pub fn new(
        device: &Device,
        groups: &Groups,
        part: &Part,
        mut weights: Weights,
        options: StoreOptions,
    ) -> Store {
        let StoreOptions { reductions, compression, .. } = options;
        weights.follow(device, &reductions);
        let gradients = Gradients::new(part, &reductions.buckets, options.gradients);
        let mut reduction = Reduction::new(part, groups.sequence, reductions, compression);
        reduction.prepare(device, groups);
        let counts = vec![0; weights.blocks()];
        Store { weights, gradients, reduction, counts, unsummed: false, host_gradients: None }
    }

    /// A whole model with random parameters on one rank.
    pub fn alone(device: &Device, part: &Part, dtype: Dtype, seed: u64) -> Store {
        let storage = Storage::on_device(dtype, Gather::Never);
        let weights = Weights::init(device, part, storage, seed);
        Store::on_one_rank(device, part, weights)
    }

    /// A whole model on one rank, with f32 gradients of one micro-batch at a time.
    pub fn on_one_rank(device: &Device, part: &Part, weights: Weights) -> Store {
        let policy = ReductionPolicy::new(PolicyInputs::ONE_RANK);
        let options = StoreOptions {
            reductions: RankReductions::new(policy, part, 0),
            gradients: Dtype::F32,
            compression: Compression::None,
        };
        Store::new(device, &Groups::alone(), part, weights, options)
    }

    /// Records all gathers, releases and reductions from now on.
    pub fn record(&mut self) -> StateLog {
        let log = StateLog::default();
        self.weights.log = Some(log.clone());
        self.reduction.log = Some(log.clone());
        log
    }

    /// One micro-batch's gradient of a block is complete.
    pub fn complete(&mut self, device: &Device, groups: &Groups, block: usize) {
        self.counts[block] += 1;
        let last = self.counts[block] == self.reduction.policy().micro_batches;
        if !self.unsummed {
            self.reduction.complete(device, groups, &mut self.gradients, block, last);
            if let Some(host) = self.host_gradients.as_ref().filter(|_| last) {
                let mut host = host.lock().expect("no thread panics while it holds the gradients");
                if host.in_backward {
                    host.leave(device, &mut self.gradients, block);
                }
            }
        }
    }

    /// Ends the passes of a step: gathered parameters are released, and gradients reduced over all ranks that have a
    /// part of them.
    pub fn finish(&mut self, device: &Device, groups: &Groups) -> Result<()> {
        self.weights.release_all();
        self.reduction.finish(device, groups, &mut self.gradients);
        if let Some(host) = &self.host_gradients {
            let mut host = host.lock().expect("no thread panics while it holds the gradients");
            host.finish(device, &self.gradients);
        }
        self.counts.fill(0);
        groups.check()
    }

    /// Frees gradients and gathered parameters.
    pub fn clear(&mut self) {
        self.reduction.abandon();
        self.gradients.clear();
        self.weights.release_all();
        self.counts.fill(0);
    }
}

/// Appends to a log if there is one.
pub(crate) fn record(log: &Option<StateLog>, op: StateOp) {
    if let Some(log) = log {
        log.lock().expect("no thread panics while it holds the log").push(op);
    }
}
