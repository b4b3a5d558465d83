//! Offloading around the passes of blocks: parameters that are updated on the host just before they are used, and saved
//! activations that are stored in host memory between a block's passes.

use lockstep_kernels::{Device, Tag, Tensor, Transfer};
use lockstep_parallel::Weights;

use crate::{Block, Slot};

/// Offloading in a pass. Nothing is offloaded by default.
#[derive(Clone, Copy, Default)]
pub struct Offloading<'a> {
    /// Updates of the last step that are applied when a block is used for the first time.
    pub updates: Option<&'a dyn PendingUpdates>,
    /// Saved activations move to host memory.
    pub activations: bool,
}

/// Parameter updates that are still to be computed.
pub trait PendingUpdates {
    /// Updates the parameters of a block, unless it is up to date.
    fn apply(&self, device: &Device, weights: &mut Weights, block: usize);
}

/// Copies of saved activations in flight, of one stage and micro-batch.
#[derive(Default)]
pub(crate) struct Movement {
    /// To the host: those of the last block.
    leaving: Vec<Transfer>,
    /// To the device: those of the next block.
    arriving: Vec<Transfer>,
}

impl Movement {
    /// Starts to copy a block's activations to the host.
    pub fn leave(&mut self, device: &Device, block: &dyn Block, saved: &mut Slot) {
        let ready = device.record();
        block.saved_tensors(saved, &mut |tensor| {
            let (rows, cols) = (tensor.rows(), tensor.cols());
            let host = device.empty_offloaded(rows, cols, tensor.dtype(), Tag::Activations);
            let from = std::mem::replace(tensor, host.clone());
            self.leaving.push(transfer(device, from, host, &ready));
        });
    }

    /// Frees the device memory of activations that have left. Later operations wait until they have.
    pub fn release(&mut self, device: &Device) {
        for copy in self.leaving.drain(..) {
            drop(copy.before_later_operations(device));
        }
    }

    /// Starts to copy a block's activations back to the device.
    pub fn fetch(&mut self, device: &Device, block: &dyn Block, saved: &mut Slot) {
        // Earlier operations may still use the memory.
        let free = device.record();
        block.saved_tensors(saved, &mut |tensor| {
            let (rows, cols) = (tensor.rows(), tensor.cols());
            let to = device.empty(rows, cols, tensor.dtype(), Tag::Activations);
            let from = std::mem::replace(tensor, to.clone());
            self.arriving.push(transfer(device, from, to, &free));
        });
    }

    /// Lets later operations wait for the activations that were fetched, and frees their host memory.
    pub fn arrive(&mut self, device: &Device) {
        for copy in self.arriving.drain(..) {
            drop(copy.before_later_operations(device));
        }
    }
}

fn transfer(
    device: &Device,
    from: Tensor,
    to: Tensor,
    after: &lockstep_kernels::Event,
) -> Transfer {
    let all = 0..from.len();
    device.transfer(from, all, to, 0, after)
}
