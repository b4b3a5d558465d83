//! Small models of the three families, and a batch for them.

use lockstep_kernels::{Device, Dtype};
use lockstep_model::{Batch, Gradients, Loss, Model, Pass, Recompute, Tape, Weights};
use lockstep_plan::model::{Family, Moe, Shape};

pub const SEQ: usize = 12;
pub const BATCH: usize = 2;

pub fn shape(family: Family) -> Shape {
    Shape {
        family,
        vocab: 37,
        dim: 16,
        layers: 3,
        heads: 4,
        kv_heads: if family == Family::Gpt2 { 4 } else { 2 },
        head_dim: 8,
        ffn: 40,
        seq: 2 * SEQ,
        tied: family == Family::Gpt2,
        norm_eps: 1e-5,
        dropout: 0.0,
        rope_theta: 10_000.0,
        rope_scaling: None,
        moe: (family == Family::Moe).then_some(Moe {
            experts: 4,
            top_k: 2,
            capacity: None,
            aux_loss: 0.02,
            z_loss: 0.01,
        }),
    }
}

pub struct Setup {
    pub device: Device,
    pub model: Model,
    pub weights: Weights,
    pub batch: Batch,
}

pub fn setup(shape: &Shape, dtype: Dtype) -> Setup {
    let device = Device::cpu(1);
    let model = Model::new(shape);
    let mut weights = Weights::init(&device, shape, dtype, 7);
    // Larger than at the start of a training, so that every path has something to say.
    let matrices: Vec<_> = weights
        .tensors()
        .filter(|(_, param, ..)| param.dims.len() == 2)
        .map(|(_, _, block, range)| (block, range))
        .collect();
    for (block, range) in matrices {
        let (master, _) = weights.master_mut(block);
        master.view_mut().part(range).host::<f32>().iter_mut().for_each(|value| *value *= 6.0);
    }
    weights.refresh(&device);
    let mut batch = Batch::empty(&device, BATCH, SEQ);
    let samples: Vec<u32> =
        (0..BATCH * (SEQ + 1)).map(|i| (i * i * 7 + 3 * i) as u32 % 37).collect();
    batch.fill(&device, &samples);
    Setup { device, model, weights, batch }
}

pub const PASS: Pass = Pass {
    dtype: Dtype::F32,
    recompute: Recompute::None,
    dropout: None,
    global_tokens: BATCH * SEQ,
};

/// All gradients in a row, and the loss.
pub fn train(setup: &Setup, pass: &Pass, times: usize) -> (Vec<f32>, Loss) {
    let mut gradients = Gradients::new(setup.model.blocks());
    let mut tape = Tape::default();
    let mut loss = Loss::default();
    for _ in 0..times {
        loss = setup.model.train(
            &setup.device,
            &setup.weights,
            &setup.batch,
            pass,
            &mut gradients,
            &mut tape,
        );
    }
    let all =
        gradients.iter().flat_map(|(_, gradient)| gradient.view().host::<f32>().to_vec()).collect();
    (all, loss)
}

/// The objective: mean cross-entropy and what routers add.
pub fn objective(loss: &Loss) -> f64 {
    loss.sum / loss.tokens as f64 + loss.auxiliary
}
