//! AdamW over this rank's shards of the flat parameters. Weight decay applies to matrices only.

use std::ops::Range;

use lockstep_kernels::{AdamW, Device, Dtype, OptimizerState, Tag, Tensor, View};
use lockstep_model::Store;
use lockstep_plan::model::{BlockParams, Part, Shard};

/// First and second moments of this rank's shards, by block and unit.
pub struct Optimizer {
    units: Vec<Vec<Moments>>,
}

struct Moments {
    first: Tensor,
    second: Tensor,
    /// Ranges of the shard, and whether weight decay applies to them.
    runs: Vec<(Range<usize>, bool)>,
}

impl Optimizer {
    /// Zero moments for the shards of `part`.
    pub fn new(device: &Device, part: &Part) -> Optimizer {
        let moment = |len| device.zeros(1, len, Dtype::F32, Tag::Optimizer);
        let moments = |block: &BlockParams, shard: &Shard| Moments {
            first: moment(shard.own.len()),
            second: moment(shard.own.len()),
            runs: runs(block, shard),
        };
        let of_block = |(block, shards): (&BlockParams, &Vec<Shard>)| {
            shards.iter().map(|shard| moments(block, shard)).collect()
        };
        Optimizer { units: part.blocks.iter().zip(&part.shards).map(of_block).collect() }
    }

    /// Updates parameters and moments from the gradients.
    pub fn step(&mut self, device: &Device, numbers: &AdamW, store: &mut Store) {
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

    /// First and second moment of this rank's shard of a unit.
    pub fn moments(&self, block: usize, unit: usize) -> (View<'_>, View<'_>) {
        let Moments { first, second, .. } = &self.units[block][unit];
        (first.view(), second.view())
    }

    pub fn moments_mut(&mut self, block: usize, unit: usize) -> (&mut Tensor, &mut Tensor) {
        let Moments { first, second, .. } = &mut self.units[block][unit];
        (first, second)
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
