//! Results of a stage's passes for one micro-batch: saved activations, and the loss.

use std::cell::RefCell;

use lockstep_kernels::{Device, Scalar, Tensor};

use crate::offload::Movement;
use crate::{Auxiliary, Deferred, Slot};

/// Activations of one stage and micro-batch, saved by the forward pass for the backward pass. Reusable for further
/// micro-batches, without new allocations.
#[derive(Default)]
pub struct Activations {
    /// One slot per block of the stage.
    pub(crate) saved: Vec<Slot>,
    /// Input of the model's last block.
    pub(crate) last_input: Option<Tensor>,
    /// Auxiliary losses of the routers.
    pub auxiliary: RefCell<Auxiliary>,
    pub(crate) deferred: Vec<DeferredBlock>,
    /// Offloaded activations on their way.
    pub(crate) movement: Movement,
}

/// Deferred weight gradients of one block.
pub(crate) struct DeferredBlock {
    pub block: usize,
    pub work: Vec<Deferred>,
}

impl Activations {
    /// Prepares for a new micro-batch of a stage with this many blocks.
    pub(crate) fn begin(&mut self, blocks: usize) {
        self.auxiliary.get_mut().clear();
        if self.saved.len() < blocks {
            self.saved.resize_with(blocks, Slot::default);
        }
    }
}

/// Loss of a micro-batch.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Loss {
    /// Cross-entropy in nats, summed over the tokens.
    pub sum: f64,
    /// Tokens of the micro-batch, by which the mean divides. Includes tokens whose target is ignored.
    pub tokens: usize,
    /// Load-balancing and z-loss of this stage's routers, weighted as in the objective: the mean over the tokens of the
    /// micro-batch and over all layers of the model. Without a balance loss over the global batch.
    pub auxiliary: f64,
    /// Slots that this stage's layers dropped because their expert was full.
    pub dropped: u64,
}

impl Loss {
    /// Sums the losses of tokens in f64 and in order. Waits for the device.
    pub fn read(device: &Device, losses: &Tensor) -> Loss {
        PendingLoss::new(device, losses).wait()
    }
}

/// Loss of a micro-batch, of which the device may still be computing the sum.
#[must_use]
#[derive(Default)]
pub struct PendingLoss {
    sum: Option<Scalar>,
    /// All but the sum.
    pub(crate) rest: Loss,
}

impl PendingLoss {
    fn new(device: &Device, losses: &Tensor) -> PendingLoss {
        let rest = Loss { tokens: losses.len(), ..Loss::default() };
        PendingLoss { sum: Some(device.sum(losses.view())), rest }
    }

    /// The loss of the tokens, if this stage computes it.
    pub(crate) fn of(device: &Device, losses: Option<Tensor>) -> PendingLoss {
        losses.map_or_else(PendingLoss::default, |losses| PendingLoss::new(device, &losses))
    }

    /// Waits for the device.
    pub fn wait(&self) -> Loss {
        Loss { sum: self.sum.as_ref().map_or(0.0, Scalar::get), ..self.rest }
    }
}
