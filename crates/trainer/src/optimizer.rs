//! AdamW over the flat buffers of a model: two moments for each parameter, and decay on matrices only.

use std::ops::Range;

use lockstep_kernels::{AdamW, Device, Dtype, Stepped, Tag, Tensor, View};
use lockstep_model::{Gradients, Weights};
use lockstep_plan::model::BlockParams;

/// AdamW and its two moments for each parameter, block by block.
pub struct Optimizer {
    blocks: Vec<Moments>,
}

struct Moments {
    first: Tensor,
    second: Tensor,
    /// Runs of parameters that decay alike.
    runs: Vec<(Range<usize>, bool)>,
}

impl Optimizer {
    /// Moments of zero, for a model laid out like this.
    pub fn new(device: &Device, layout: &[BlockParams]) -> Optimizer {
        let moment = |len| device.zeros(1, len, Dtype::F32, Tag::Optimizer);
        let blocks = layout
            .iter()
            .map(|block| Moments {
                first: moment(block.len()),
                second: moment(block.len()),
                runs: runs(block),
            })
            .collect();
        Optimizer { blocks }
    }

    /// One step: parameters and moments follow the gradients. `numbers.weight_decay` acts on what decays.
    pub fn step(
        &mut self,
        device: &Device,
        numbers: &AdamW,
        weights: &mut Weights,
        gradients: &Gradients,
    ) {
        for (block, gradient) in gradients.iter() {
            let Moments { first, second, runs } = &mut self.blocks[block];
            let (master, mut copy) = weights.master_mut(block);
            for (run, decays) in runs.iter() {
                let numbers = AdamW {
                    weight_decay: if *decays { numbers.weight_decay } else { 0.0 },
                    ..*numbers
                };
                let state = Stepped {
                    parameters: master.view_mut().part(run.clone()),
                    copy: copy.as_mut().map(|copy| copy.view_mut().part(run.clone())),
                    first: first.view_mut().part(run.clone()),
                    second: second.view_mut().part(run.clone()),
                };
                device.adamw(&numbers, state, gradient.view().part(run.clone()));
            }
        }
    }

    /// Both moments of a block.
    pub fn moments(&self, block: usize) -> (View<'_>, View<'_>) {
        (self.blocks[block].first.view(), self.blocks[block].second.view())
    }

    /// Both moments of a block, to be filled from a checkpoint.
    pub fn moments_mut(&mut self, block: usize) -> (&mut Tensor, &mut Tensor) {
        let Moments { first, second, .. } = &mut self.blocks[block];
        (first, second)
    }
}

/// Neighbours that decay alike, joined: fewer, longer walks over memory.
fn runs(block: &BlockParams) -> Vec<(Range<usize>, bool)> {
    let mut runs: Vec<(Range<usize>, bool)> = Vec::new();
    for (start, param) in block.placed() {
        let end = start + param.len();
        match runs.last_mut() {
            Some((run, decays)) if *decays == param.decay => run.end = end,
            _ => runs.push((start..end, param.decay)),
        }
    }
    runs
}
