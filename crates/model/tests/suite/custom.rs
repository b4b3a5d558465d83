//! Models with blocks that are not built in.

use lockstep_comm::on_threads;
use lockstep_kernels::{Device, Dtype, Matmul, Tag, Tensor};
use lockstep_model::{
    Activations, Batch, Block, Ctx, Groups, Model, Slot, StagePass, Store, Transformer,
    WeightGrads, Weights,
};
use lockstep_parallel::{Storage, StoreOptions};
use lockstep_plan::model::{BlockParams, Family, Init, Param, Part, Shape, Split};
use lockstep_plan::reduction::{PolicyInputs, RankReductions, ReductionPolicy};
use lockstep_plan::{Compression, Mesh};

use crate::gradients::{moved, slope};
use crate::setup::{BATCH, PLAIN, SEQ, Setup, batch, enlarge, objective, shape, train};

/// x + W·x.
struct Adapter {
    params: BlockParams,
}

impl Block for Adapter {
    fn params(&self) -> &BlockParams {
        &self.params
    }

    fn forward(&self, cx: &Ctx<'_>, x: Tensor, saved: &mut Slot) -> Tensor {
        let weight = cx.weights.shaped(x.cols(), x.cols());
        let mut y = cx.saved(x.rows(), x.cols());
        let product = Matmul::linear(x.view(), weight, y.view_mut());
        cx.device.matmul(Matmul { residual: Some(x.view()), ..product });
        saved.put(x);
        y
    }

    fn backward(
        &self,
        cx: &Ctx<'_>,
        saved: &mut Slot,
        dy: Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Option<Tensor> {
        let x: Tensor = saved.take();
        grads.weight(self.params.range("weight"), &dy, &x);
        let weight = cx.weights.shaped(x.cols(), x.cols());
        let mut dx = cx.scratch(x.rows(), x.cols());
        cx.device.matmul(Matmul::linear_dx(dy.view(), weight, dx.view_mut()));
        cx.device.add(dx.view_mut(), dy.view());
        Some(dx)
    }
}

/// Multiplies the loss of each token by a learned factor per sequence: a last block after the head.
struct LossWeights {
    params: BlockParams,
}

impl Block for LossWeights {
    fn params(&self) -> &BlockParams {
        &self.params
    }

    fn forward(&self, cx: &Ctx<'_>, losses: Tensor, saved: &mut Slot) -> Tensor {
        let mut weighted = cx.device.empty(1, losses.len(), Dtype::F32, Tag::Buffers);
        cx.device.copy(losses.view(), weighted.view_mut());
        let mut rows = weighted.shaped(BATCH, SEQ);
        let factors = cx.weights.shaped(BATCH, 1);
        cx.device.scale_rows(rows.view_mut(), factors);
        saved.put(losses);
        rows.shaped(1, BATCH * SEQ)
    }

    fn backward(
        &self,
        cx: &Ctx<'_>,
        saved: &mut Slot,
        dy: Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Option<Tensor> {
        let losses = saved.take::<Tensor>().shaped(BATCH, SEQ);
        let mut dy = dy.shaped(BATCH, SEQ);
        grads.in_f32(self.params.range("factors"), |place, accumulate| {
            assert!(!accumulate, "one micro-batch");
            cx.device.row_dots(losses.view(), dy.view(), place.shaped(BATCH, 1));
        });
        cx.device.scale_rows(dy.view_mut(), cx.weights.shaped(BATCH, 1));
        Some(dy.shaped(1, BATCH * SEQ))
    }
}

fn adapter(dim: usize) -> BlockParams {
    BlockParams::new("adapter", vec![Param::matrix("weight", [dim, dim], 0.02, Split::Norm)])
}

fn lists(shape: &Shape) -> Vec<BlockParams> {
    let mut lists = shape.blocks();
    lists.insert(2, adapter(shape.dim));
    lists
}

fn model(shape: &Shape, part: Part) -> Model {
    let transformer = Transformer::new(shape, &part);
    let block = |params: &BlockParams| -> Box<dyn Block> {
        let custom = params.clone();
        match params.name.as_str() {
            "adapter" => Box::new(Adapter { params: custom }),
            "loss_weights" => Box::new(LossWeights { params: custom }),
            _ => transformer.block(params),
        }
    };
    let blocks = part.blocks.iter().map(block).collect();
    Model::from_blocks(part, blocks, shape.vocab, shape.seq)
}

fn setup(shape: &Shape, lists: Vec<BlockParams>) -> Setup {
    let (device, groups) = (Device::from_env(1), Groups::alone());
    let model = model(shape, Part::whole(lists));
    let store = Store::alone(&device, &model.part, Dtype::F32, 7);
    let batch = batch(&device);
    Setup { device, groups, model, store, batch }
}

#[test]
fn gradients_of_a_custom_block_match_finite_differences() {
    // GPT-2 shares its output projection with the embedding, across the custom block.
    for family in [Family::Gpt2, Family::Llama] {
        let shape = shape(family);
        let mut setup = setup(&shape, lists(&shape));
        enlarge(&setup.device, &mut setup.store.weights);
        let (slope, square) = slope(&mut setup, &PLAIN);
        assert!((slope / square - 1.0).abs() < 2e-3, "{family:?}: {slope} against {square}");
    }
}

#[test]
fn a_model_with_a_custom_block_trains() {
    let shape = shape(Family::Llama);
    let mut setup = setup(&shape, lists(&shape));
    let before = setup.device.to_vec::<f32>(setup.store.weights.block(2));
    let losses: Vec<f64> = (0..30)
        .map(|_| {
            let (gradient, loss) = train(&mut setup, &PLAIN, 1);
            moved(&mut setup, &gradient, -0.3);
            objective(&loss)
        })
        .collect();
    assert!(losses[29] < 0.8 * losses[0], "{losses:?}");
    let after = setup.device.to_vec::<f32>(setup.store.weights.block(2));
    assert!(after != before, "the adapter was trained");
}

/// The head is not the last block, so its forward and backward passes are not fused.
#[test]
fn a_custom_block_may_compute_the_loss() {
    let shape = shape(Family::Llama);
    let mut all = lists(&shape);
    let factors = Param::vector("factors", BATCH, Init::Ones, Split::Replicated);
    all.push(BlockParams::new("loss_weights", vec![factors]));
    let mut weighted = setup(&shape, all);
    let (ours, loss) = train(&mut weighted, &PLAIN, 1);
    let (fused, fused_loss) = train(&mut setup(&shape, lists(&shape)), &PLAIN, 1);
    assert!((loss.sum / fused_loss.sum - 1.0).abs() < 1e-6);
    for (index, (ours, fused)) in ours.iter().zip(&fused).enumerate() {
        assert!((ours - fused).abs() <= 1e-5 * fused.abs().max(1e-3), "{index}: {ours}, {fused}");
    }
    let (slope, square) = slope(&mut weighted, &PLAIN);
    assert!((slope / square - 1.0).abs() < 2e-3, "{slope} against {square}");
}

/// ZeRO-3 shards and gathers a custom block as any other.
#[test]
fn a_custom_block_is_sharded() {
    let shape = &shape(Family::Llama);
    let mut alone = setup(shape, lists(shape));
    train(&mut alone, &PLAIN, 1);
    let gradient =
        |device: &Device, store: &Store| device.to_vec::<f32>(store.gradients.own(2, 0).unwrap());
    let part = Part::whole(lists(shape));
    let expected = {
        let Setup { device, groups, model, mut store, batch } = alone;
        let pass = PLAIN.pass(&device, &groups);
        model.train(&pass, &batch, &mut store, &mut Activations::default());
        gradient(&device, &store)
    };
    let mesh = Mesh { data: 2, shard: 2, ..Mesh::ONE };
    let shards = on_threads(2, |world| {
        let device = Device::from_env(1);
        let groups = Groups::new(&world, &mesh, false).unwrap();
        let part = Part::new(&mesh, groups.coord, 1, lists(shape));
        let model = model(shape, part);
        let policy =
            ReductionPolicy::new(PolicyInputs { zero: 3, replicas: 2, ..PolicyInputs::ONE_RANK });
        let storage = Storage::on_device(Dtype::F32, policy.gather);
        let weights = Weights::init(&device, &model.part, storage, 7);
        let options = StoreOptions {
            reductions: RankReductions::new(policy, &model.part, 0),
            gradients: Dtype::F32,
            compression: Compression::None,
        };
        let mut store = Store::new(&device, &groups, &model.part, weights, options);
        let batch: Batch = batch(&device);
        let mut pass = PLAIN.pass(&device, &groups);
        // Both ranks train on the same samples.
        pass.global_tokens *= 2;
        let at = StagePass { stage: 0, pass: &pass, batch: &batch, defer_weight_grads: false };
        let mut activations = Activations::default();
        model.forward(&at, None, &mut store.weights, &mut activations);
        let _ = model.backward(&at, None, &mut store, &mut activations);
        store.finish(&device, &groups).unwrap();
        gradient(&device, &store)
    });
    assert_eq!(shards.concat().len(), part.blocks[2].len());
    for (ours, expected) in shards.concat().iter().zip(&expected) {
        assert!((ours - expected).abs() <= 1e-6 * expected.abs().max(1e-2));
    }
}
