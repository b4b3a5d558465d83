//! Gradients of this rank's shards in host memory, for an optimizer that runs there.
//!
//! Blocks whose gradient is final in the backward pass leave the device at once: a buffer is freed when the gradient of
//! the next block has been computed, so at most two are on the device. The others leave at the end of the passes.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use lockstep_kernels::{Device, Dtype, Event, Scalar, Tag, Tensor, Transfer, View};
use lockstep_plan::model::Part;

use crate::Gradients;

/// [`HostGradients`] that the backward pass fills and the optimizer reads.
pub type SharedHostGradients = Arc<Mutex<HostGradients>>;

/// Gradients by block and unit.
pub struct HostGradients {
    /// Blocks leave in the last micro-batch's backward pass.
    pub in_backward: bool,
    blocks: Vec<Vec<HostGradient>>,
    /// Copies of the block that left last.
    leaving: Vec<Transfer>,
    /// All blocks that leave in the backward pass have left.
    left: Option<Event>,
}

struct HostGradient {
    values: Tensor,
    /// Ranges that count in the norm, and the sums of their squares.
    norm_ranges: Vec<Range<usize>>,
    squares: Vec<Scalar>,
    /// A copy that the host has not waited for.
    copy: Option<Transfer>,
    /// The values are, or will be, those of this step.
    filled: bool,
}

impl HostGradients {
    /// Buffers for the shards of `part`. `norm_ranges` are the ranges that this rank adds to the norm: block, unit, range.
    pub fn new(
        device: &Device,
        part: &Part,
        dtype: Dtype,
        norm_ranges: &[(usize, usize, Range<usize>)],
        in_backward: bool,
    ) -> HostGradients {
        let ranges = |block: usize, unit: usize| {
            let own = norm_ranges.iter().filter(|(b, u, _)| (*b, *u) == (block, unit));
            own.map(|(_, _, range)| range.clone()).collect()
        };
        let blocks = part.shards.iter().enumerate().map(|(block, shards)| {
            let unit = |(unit, shard): (usize, &lockstep_plan::model::Shard)| HostGradient {
                values: device.empty_offloaded(1, shard.own.len(), dtype, Tag::Gradients),
                norm_ranges: ranges(block, unit),
                squares: Vec::new(),
                copy: None,
                filled: false,
            };
            shards.iter().enumerate().map(unit).collect()
        });
        HostGradients { in_backward, blocks: blocks.collect(), leaving: Vec::new(), left: None }
    }

    /// Copies a block's final gradient to the host and frees it on the device, in the backward pass.
    pub(crate) fn leave(&mut self, device: &Device, gradients: &mut Gradients, block: usize) {
        self.add_squares(device, gradients, block);
        self.release(device);
        let ready = device.record();
        for (unit, host) in self.blocks[block].iter_mut().enumerate() {
            let Some((from, range)) = gradients.own_part(block, unit) else { continue };
            host.filled = true;
            self.leaving.push(device.transfer(from, range, host.values.clone(), 0, &ready));
        }
        drop(gradients.take(gradients.bucket_of(block)));
    }

    /// Ends the passes: the gradients that are still on the device start to leave it. The host waits for each when it
    /// needs it.
    pub(crate) fn finish(&mut self, device: &Device, gradients: &Gradients) {
        self.release(device);
        if self.in_backward {
            self.left = Some(device.record());
            return;
        }
        for block in 0..self.blocks.len() {
            self.add_squares(device, gradients, block);
        }
        let ready = device.record();
        for (block, units) in self.blocks.iter_mut().enumerate() {
            for (unit, host) in units.iter_mut().enumerate() {
                let Some((from, range)) = gradients.own_part(block, unit) else { continue };
                host.filled = true;
                let to = host.values.clone();
                host.copy = Some(device.transfer(from, range, to, 0, &ready));
            }
        }
    }

    fn add_squares(&mut self, device: &Device, gradients: &Gradients, block: usize) {
        for (unit, host) in self.blocks[block].iter_mut().enumerate() {
            let Some(own) = gradients.own(block, unit) else { continue };
            let squares = host
                .norm_ranges
                .iter()
                .map(|range| device.sum_of_squares([own.part(range.clone())]));
            host.squares.extend(squares);
        }
    }

    /// Sum of squares of the ranges that this rank adds to the norm. Waits for the device, and for the gradients that
    /// left it in the backward pass.
    pub fn squares(&mut self) -> f64 {
        if let Some(left) = self.left.take() {
            left.wait();
        }
        let all = self.blocks.iter_mut().flatten().flat_map(|host| host.squares.drain(..));
        all.map(|squares| squares.get()).sum()
    }

    /// The gradient of this rank's shard of a unit, once, if there is one. Waits until it is in host memory.
    pub fn take_own(&mut self, block: usize, unit: usize) -> Option<View<'_>> {
        let HostGradient { values, copy, filled, .. } = &mut self.blocks[block][unit];
        // Frees the gradient on the device.
        drop(copy.take().map(Transfer::wait));
        std::mem::take(filled).then(|| values.view())
    }

    /// Begins a step. Gradients of the step before stay until they are used.
    pub fn begin(&mut self) {
        // A failed step leaves squares behind.
        self.blocks.iter_mut().flatten().for_each(|host| host.squares.clear());
    }

    /// Frees the device memory of the block that left last. Later operations wait for its copy; the host has waited for
    /// it when it has the result of one of them.
    fn release(&mut self, device: &Device) {
        for copy in self.leaving.drain(..) {
            drop(copy.before_later_operations(device));
        }
    }
}
