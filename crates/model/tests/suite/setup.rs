//! Small models of the three families, and a batch for them.

use lockstep_kernels::{Device, Dtype};
use lockstep_model::{
    Activations, Batch, Dropout, Groups, Loss, Model, Pass, Recompute, Store, Weights,
};
use lockstep_plan::model::{Balance, Family, Moe, Shape};

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
            balance: Balance::Sequence,
            shared: 0,
        }),
        latent: None,
        lead: None,
    }
}

pub struct Setup {
    pub device: Device,
    pub groups: Groups,
    pub model: Model,
    pub store: Store,
    pub batch: Batch,
}

pub fn setup(shape: &Shape, dtype: Dtype) -> Setup {
    let (device, groups) = (Device::from_env(1), Groups::alone());
    let model = Model::whole(shape);
    let mut store = Store::alone(&device, &model.part, dtype, 7);
    enlarge(&device, &mut store.weights);
    let batch = batch(&device);
    Setup { device, groups, model, store, batch }
}

pub fn batch(device: &Device) -> Batch {
    let mut batch = Batch::empty(device, BATCH, SEQ);
    let samples: Vec<u32> =
        (0..BATCH * (SEQ + 1)).map(|i| (i * i * 7 + 3 * i) as u32 % 37).collect();
    batch.fill(device, &samples);
    batch
}

/// Enlarges the initial matrices, so that every path contributes to the gradients.
pub fn enlarge(device: &Device, weights: &mut Weights) {
    for block in 0..weights.blocks() {
        let layout = weights.layout[block].clone();
        let shards: Vec<_> = weights.shards(block).cloned().collect();
        for (unit, shard) in shards.iter().enumerate() {
            let (mut master, copy) = weights.own_mut(block, unit);
            for (start, param) in layout.placed().filter(|(_, param)| param.dims.len() == 2) {
                // A parameter is in one unit.
                if shard.own.contains(&start) {
                    let start = start - shard.own.start;
                    let matrix = master.reborrow().part(start..start + param.len());
                    let mut values = device.to_vec::<f32>(matrix.as_view());
                    values.iter_mut().for_each(|value| *value *= 6.0);
                    device.write(matrix, &values);
                }
            }
            if let Some(copy) = copy {
                device.cast(master.as_view(), copy);
            }
        }
    }
}

/// Settings of a pass, without device and groups.
#[derive(Clone, Copy)]
pub struct Way {
    pub dtype: Dtype,
    pub recompute: Recompute,
    pub dropout: Option<Dropout>,
}

pub const PLAIN: Way = Way { dtype: Dtype::F32, recompute: Recompute::None, dropout: None };

impl Way {
    pub fn pass<'a>(&self, device: &'a Device, groups: &'a Groups) -> Pass<'a> {
        let Way { dtype, recompute, dropout } = *self;
        Pass {
            device,
            groups,
            dtype,
            recompute,
            dropout,
            global_tokens: BATCH * SEQ,
            loads: None,
            offload: Default::default(),
            fp8: None,
        }
    }
}

/// All gradients, concatenated, and the loss.
pub fn train(setup: &mut Setup, way: &Way, times: usize) -> (Vec<f32>, Loss) {
    let Setup { device, groups, model, store, batch } = setup;
    let pass = way.pass(device, groups);
    let mut activations = Activations::default();
    let mut loss = Loss::default();
    for _ in 0..times {
        loss = model.train(&pass, batch, store, &mut activations);
    }
    let gradients = all_gradients(device, store);
    store.clear();
    (gradients, loss)
}

/// The gradients of all blocks, concatenated.
pub fn all_gradients(device: &Device, store: &Store) -> Vec<f32> {
    let of_block = |block| store.gradients.get(block).expect("every block has a gradient");
    let blocks = 0..store.gradients.blocks();
    blocks.flat_map(|block| device.to_vec::<f32>(of_block(block))).collect()
}

/// The objective: mean cross-entropy plus the auxiliary losses.
pub fn objective(loss: &Loss) -> f64 {
    loss.sum / loss.tokens as f64 + loss.auxiliary
}
