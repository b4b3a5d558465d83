//! A mixture of experts with context parallelism: ranks that hold parts of the same sequences balance whole sequences, or
//! the global batch.

use std::cell::RefCell;

use lockstep_comm::on_threads;
use lockstep_kernels::{Device, Dtype, Tag, Tensor, View};
use lockstep_parallel::Groups;
use lockstep_plan::context::Run;
use lockstep_plan::model::{Balance, BlockParams, Family, Moe, Part, Shape};
use lockstep_plan::{Mesh, presets};

use crate::feed_forward::FeedForward;
use crate::{Auxiliary, Ctx, ExpertLoads, Recompute, WeightGrads};

const SEQ: usize = 8;
const BATCH: usize = 3;

/// Results of a rank: its part of the loss, and the gradients of its rows of the stream and of the router.
struct Found {
    loss: f64,
    dx: Vec<f32>,
    router: Vec<f32>,
}

fn number(i: usize) -> f32 {
    let mixed = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Element j of position p of sequence s.
fn element(s: usize, p: usize, j: usize, dim: usize) -> f32 {
    number(((s * SEQ + p) * dim + j) * 3 + 1)
}

/// Forward and backward pass of a feed-forward. `all` lists the parameters with all experts, `params` those of this
/// rank.
fn feed_forward(
    groups: &Groups,
    shape: &Shape,
    all: &BlockParams,
    params: &BlockParams,
    runs: &[Run],
) -> Found {
    let device = Device::cpu(1);
    let mut weights = device.empty(1, params.len(), Dtype::F32, Tag::Parameters);
    for (start, param) in params.placed() {
        let place = weights.view_mut().part(start..start + param.len()).host::<f32>();
        for (i, value) in all.range(&param.name).zip(place) {
            *value = 0.5 * number(i * 7);
        }
    }
    let auxiliary = RefCell::new(Auxiliary::default());
    let mut loads = ExpertLoads::new(&device, shape).unwrap();
    let experts = shape.moe.unwrap().experts as u64;
    loads.begin(&device, &(0..experts).map(|expert| 3 * expert + 1).collect::<Vec<_>>());
    let here: usize = runs.iter().map(|run| run.len).sum();
    let cx = Ctx {
        device: &device,
        groups,
        weights: weights.view(),
        shared: None,
        dtype: Dtype::F32,
        recompute: Recompute::None,
        batch: BATCH,
        runs,
        inputs: View::of::<u32>(&[]),
        targets: None,
        loss_scale: 1.0,
        dropout: None,
        share: here as f32 / SEQ as f32,
        auxiliary: Some(&auxiliary),
        loads: Some(&loads),
        recomputing: false,
        fp8: None,
    };
    let rows = |scale: f32| {
        let mut rows = Vec::new();
        for run in runs {
            for s in 0..BATCH {
                for p in run.start..run.start + run.len {
                    rows.extend((0..shape.dim).map(|j| scale * element(s, p, j, shape.dim)));
                }
            }
        }
        let mut tensor = device.empty(BATCH * here, shape.dim, Dtype::F32, Tag::Buffers);
        device.write(tensor.view_mut(), &rows);
        tensor
    };
    let block = FeedForward::new(shape, params, 1);
    let (x, dy): (Tensor, Tensor) = (rows(1.0), rows(0.1));
    let (_, saved) = block.forward(&cx, x, true);
    let mut gradients = device.zeros(1, params.len(), Dtype::F32, Tag::Gradients);
    let mut grads = WeightGrads::new(&device, gradients.view_mut(), false);
    let dx = block.backward(&cx, saved, (dy, None), &mut grads);
    groups.check().unwrap();
    let router = gradients.view().part(params.range("router.weight")).host::<f32>().to_vec();
    let loss = auxiliary.borrow().loss() * cx.share as f64;
    Found { loss, dx: dx.view().host::<f32>().to_vec(), router }
}

fn close(what: &str, ours: &[f32], right: &[f32]) {
    assert_eq!(ours.len(), right.len());
    let largest = right.iter().fold(0f32, |most, x| most.max(x.abs()));
    for (ours, right) in ours.iter().zip(right) {
        assert!((ours - right).abs() <= 2e-6 * largest, "{what}: {ours} against {right}");
    }
}

#[test]
fn context_parallel_ranks_balance_the_same_tokens_as_one() {
    for balance in [Balance::Sequence, Balance::Batch] {
        let mut shape = presets::shape("moe-test", Some(64)).unwrap();
        assert_eq!(shape.family, Family::Moe);
        shape.moe = shape.moe.map(|moe| Moe { aux_loss: 1.0, z_loss: 0.1, balance, ..moe });
        let whole = Part::whole(shape.blocks());
        let all = &whole.blocks[1];
        let right = feed_forward(&Groups::alone(), &shape, all, all, &[Run { start: 0, len: SEQ }]);

        // Each rank has an early and a late run, as in ring attention.
        for (context, expert) in [(2, 1), (2, 2), (4, 2)] {
            let mesh = Mesh { context, expert, ..Mesh::ONE };
            let len = SEQ / (2 * context);
            let found = on_threads(context, |world| {
                let groups = Groups::new(&world, &mesh, false).unwrap();
                let part = Part::new(&mesh, groups.coord, 1, shape.blocks());
                let at = world.rank();
                let late = 2 * context - 1 - at;
                let runs = [at, late].map(|piece| Run { start: piece * len, len });
                feed_forward(&groups, &shape, all, &part.blocks[1], &runs)
            });
            let loss: f64 = found.iter().map(|found| found.loss).sum();
            assert!((loss / right.loss - 1.0).abs() < 1e-6, "{loss} against {}", right.loss);
            let mut router = vec![0.0; right.router.len()];
            for (rank, found) in found.iter().enumerate() {
                router.iter_mut().zip(&found.router).for_each(|(sum, one)| *sum += one);
                let mut rows = Vec::new();
                for piece in [rank, 2 * context - 1 - rank] {
                    for s in 0..BATCH {
                        let start = (s * SEQ + piece * len) * shape.dim;
                        rows.extend(&right.dx[start..start + len * shape.dim]);
                    }
                }
                close("stream", &found.dx, &rows);
            }
            close("router", &router, &right.router);
        }
    }
}
