//! AdamW over this rank's shards of the flat parameters. Weight decay applies to matrices only.
//!
//! With `layout.offload` the states are in host memory and the host's cores compute the update: block by block in the
//! order of the next forward pass, each just before the block is used. So the copies of gradients and parameters, the
//! updates of later blocks, and the forward passes of earlier ones overlap.

use std::cell::RefCell;
use std::ops::Range;

use lockstep_kernels::{
    AdamW, Device, DeviceType, Dtype, Event, OptimizerState, Tag, Tensor, View,
};
use lockstep_model::{PendingUpdates, Store, Weights};
use lockstep_parallel::{HostShard, SharedHostGradients};
use lockstep_plan::model::{BlockParams, Part, Shard};

/// First and second moments of this rank's shards, by block and unit.
pub struct Optimizer {
    units: Vec<Vec<Moments>>,
    /// With states in host memory.
    host: Option<Host>,
    pending: Option<Pending>,
}

/// An optimizer in host memory.
struct Host {
    /// Computes on the host's cores.
    device: Device,
    gradients: SharedHostGradients,
}

struct Moments {
    first: Tensor,
    second: Tensor,
    /// Ranges of the shard, and whether weight decay applies to them.
    runs: Vec<(Range<usize>, bool)>,
}

/// A step whose updates are not all computed.
struct Pending {
    numbers: AdamW,
    /// By block, whether it is updated.
    updated: Vec<bool>,
    /// The device has finished with the old parameters.
    passes: Event,
}

impl Optimizer {
    /// Zero moments for the shards of `part`.
    pub fn new(device: &Device, part: &Part) -> Optimizer {
        Optimizer::with_host(device, part, None)
    }

    /// Zero moments in host memory. `threads` cores compute the updates from `gradients`.
    pub fn offloaded(
        device: &Device,
        part: &Part,
        gradients: SharedHostGradients,
        threads: usize,
    ) -> Optimizer {
        let cores = match device.device_type() {
            DeviceType::Cpu => device.clone(),
            DeviceType::Cuda => Device::cpu(threads),
        };
        Optimizer::with_host(device, part, Some(Host { device: cores, gradients }))
    }

    fn with_host(device: &Device, part: &Part, host: Option<Host>) -> Optimizer {
        let moment = |len| match host {
            None => device.zeros(1, len, Dtype::F32, Tag::Optimizer),
            Some(_) => {
                let mut moment = device.empty_offloaded(1, len, Dtype::F32, Tag::Optimizer);
                moment.view_mut().host::<f32>().fill(0.0);
                moment
            }
        };
        let moments = |block: &BlockParams, shard: &Shard| Moments {
            first: moment(shard.own.len()),
            second: moment(shard.own.len()),
            runs: runs(block, shard),
        };
        let of_block = |(block, shards): (&BlockParams, &Vec<Shard>)| {
            shards.iter().map(|shard| moments(block, shard)).collect()
        };
        let units = part.blocks.iter().zip(&part.shards).map(of_block).collect();
        Optimizer { units, host, pending: None }
    }

    /// Updates parameters and moments from the gradients. If the states are offloaded, each block is updated by
    /// [`PendingUpdates::apply`], or all by [`Optimizer::settle`].
    pub fn step(&mut self, device: &Device, numbers: &AdamW, store: &mut Store) {
        if self.host.is_some() {
            let (updated, passes) = (vec![false; self.units.len()], device.record());
            self.pending = Some(Pending { numbers: *numbers, updated, passes });
            return;
        }
        for (block, units) in self.units.iter_mut().enumerate() {
            for (unit, moments) in units.iter_mut().enumerate() {
                let Some(gradient) = store.gradients.own(block, unit) else { continue };
                let (mut master, mut copy) = store.weights.own_mut(block, unit);
                let Moments { first, second, runs } = moments;
                let state = OptimizerState {
                    parameters: master.reborrow(),
                    bf16_copy: copy.as_mut().map(|copy| copy.reborrow()),
                    first_moment: first.view_mut(),
                    second_moment: second.view_mut(),
                };
                device.adamw_runs(numbers, state, gradient, runs);
            }
        }
    }

    /// Computes all updates of the last step that are pending.
    pub fn settle(&mut self, device: &Device, weights: &mut Weights) {
        (0..self.units.len()).for_each(|block| self.update(device, weights, block));
        self.pending = None;
    }

    /// Whether no update is pending.
    pub fn is_settled(&self) -> bool {
        self.pending.is_none()
    }

    /// Updates a block on the host and starts to copy it to the device.
    fn update(&mut self, device: &Device, weights: &mut Weights, block: usize) {
        let (Some(host), Some(pending)) = (&self.host, &mut self.pending) else { return };
        if std::mem::replace(&mut pending.updated[block], true) {
            return;
        }
        let mut gradients =
            host.gradients.lock().expect("no thread panics while it holds the gradients");
        for (unit, moments) in self.units[block].iter_mut().enumerate() {
            let Some(gradient) = gradients.take_own(block, unit) else { continue };
            let HostShard { master, copy } = weights.host_mut(block, unit);
            let Moments { first, second, runs } = moments;
            let state = OptimizerState {
                parameters: master,
                bf16_copy: copy,
                first_moment: first.view_mut(),
                second_moment: second.view_mut(),
            };
            host.device.adamw_runs(&pending.numbers, state, gradient, runs);
        }
        weights.upload(device, block, &pending.passes);
    }

    /// First and second moment of this rank's shard of a unit.
    ///
    /// # Panics
    /// If updates are pending.
    pub fn moments(&self, block: usize, unit: usize) -> (View<'_>, View<'_>) {
        assert!(self.is_settled(), "updates are pending; call Rank::settle first");
        let Moments { first, second, .. } = &self.units[block][unit];
        (first.view(), second.view())
    }

    pub fn moments_mut(&mut self, block: usize, unit: usize) -> (&mut Tensor, &mut Tensor) {
        assert!(self.is_settled(), "updates are pending; call Rank::settle first");
        let Moments { first, second, .. } = &mut self.units[block][unit];
        (first, second)
    }
}

/// The updates of the last step, applied during the forward passes of the next one.
pub(crate) struct LazyUpdates<'a>(RefCell<&'a mut Optimizer>);

impl<'a> LazyUpdates<'a> {
    /// None if no update is pending.
    pub fn of(optimizer: &'a mut Optimizer) -> Option<LazyUpdates<'a>> {
        (!optimizer.is_settled()).then(|| LazyUpdates(RefCell::new(optimizer)))
    }
}

impl PendingUpdates for LazyUpdates<'_> {
    fn apply(&self, device: &Device, weights: &mut Weights, block: usize) {
        self.0.borrow_mut().update(device, weights, block);
    }
}

/// Ranges of the shard with the same weight decay. Adjacent parameters are merged, so that the kernel runs on fewer,
/// longer ranges.
fn runs(block: &BlockParams, shard: &Shard) -> Vec<(Range<usize>, bool)> {
    let mut runs: Vec<(Range<usize>, bool)> = Vec::new();
    for (start, param) in block.placed() {
        let Some(own) = shard.within(start..start + param.len()) else { continue };
        match runs.last_mut() {
            Some((run, decays)) if *decays == param.decay => run.end = own.end,
            _ => runs.push((own, param.decay)),
        }
    }
    runs
}
