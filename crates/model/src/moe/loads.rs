//! Loads of the experts over the global batch.
//!
//! The balance loss over a batch of T tokens is `experts · Σ_e f_e · P_e`: f_e is the number of slots of expert e divided
//! by T, P_e the mean of its probability. Its gradient flows through P only, so each token adds `experts · f_e / T`. The
//! slots of the whole global batch are known only after its last forward pass, while the first backward pass comes
//! before (gradient accumulation, pipelines), and to hold the activations of all micro-batches or to run every forward
//! pass twice would cost far more than the loss. Therefore the gradient uses the fractions f of the **previous** step's
//! global batch. They are sums over all ranks and micro-batches, are saved in checkpoints, and do not depend on the
//! layout. Before the first step all fractions are taken as equal, which gives no gradient.

use std::cell::RefCell;

use lockstep_kernels::{Device, Dtype, Router, Tag, Tensor, View};
use lockstep_plan::model::Shape;

/// Sums over the micro-batches of a step on this rank, and the slots of the previous step on all ranks.
pub struct ExpertLoads {
    experts: usize,
    sums: RefCell<Tensor>, // (layers, 2 experts), f32: slots, then probabilities
    previous: Tensor,      // (layers, experts), f32
    /// The slots of one layer on the host.
    row: Vec<f32>,
}

impl ExpertLoads {
    /// Memory for the layers of a whole model; `None` if it has no experts.
    pub fn new(device: &Device, shape: &Shape) -> Option<ExpertLoads> {
        let experts = shape.moe?.experts;
        let zeros = |cols| device.zeros(shape.layers, cols, Dtype::F32, Tag::Buffers);
        Some(ExpertLoads {
            experts,
            sums: RefCell::new(zeros(2 * experts)),
            previous: zeros(experts),
            row: vec![0.0; experts],
        })
    }

    /// Prepares for a step. `previous` has the slots of each layer's experts in the previous global batch, layer by
    /// layer; empty before the first step.
    pub fn begin(&mut self, device: &Device, previous: &[u64]) {
        device.fill(self.sums.get_mut().view_mut(), 0.0);
        device.fill(self.previous.view_mut(), 0.0);
        let layers = self.previous.rows();
        for (layer, slots) in previous.chunks_exact(self.experts).take(layers).enumerate() {
            self.row.iter_mut().zip(slots).for_each(|(row, slots)| *row = *slots as f32);
            device.write(self.previous.view_mut().rows_of(layer..layer + 1), &self.row);
        }
    }

    /// Writes this rank's sums: of each layer the slots of all experts, then their probabilities. Waits for the device.
    pub fn read(&mut self, device: &Device, to: &mut [f64]) {
        let sums = self.sums.get_mut();
        for (half, to) in to.chunks_exact_mut(self.experts).enumerate() {
            device.read(
                sums.view().part(half * self.experts..(half + 1) * self.experts),
                &mut self.row,
            );
            to.iter_mut().zip(&self.row).for_each(|(to, sum)| *to = f64::from(*sum));
        }
    }

    /// Adds the tokens of a micro-batch.
    pub(super) fn add(
        &self,
        device: &Device,
        layer: usize,
        router: &Router,
        (chosen, probs): (View<'_>, View<'_>),
    ) {
        let mut sums = self.sums.borrow_mut();
        let row = sums.view_mut().rows_of(layer..layer + 1);
        let (slots, of_probs) = row.split_at(self.experts);
        device.expert_loads(router, chosen, probs, slots, of_probs);
    }

    /// Slots of a layer's experts in the previous step.
    pub(super) fn previous(&self, layer: usize) -> View<'_> {
        self.previous.view().rows_of(layer..layer + 1)
    }
}
