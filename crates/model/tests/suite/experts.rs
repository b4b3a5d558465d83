//! A mixture of experts computes the same on every layout as on one rank with the whole batch: loss, auxiliary losses,
//! dropped slots and every gradient.

use std::collections::HashMap;

use lockstep_comm::{World, on_threads};
use lockstep_kernels::{Device, Dtype};
use lockstep_model::{
    Activations, Batch, ExpertLoads, Groups, Model, Offloading, Pass, Recompute, StagePass, Store,
    Weights,
};
use lockstep_parallel::{Storage, StoreOptions};
use lockstep_plan::model::{Balance, Family, Moe, Param, Part, Runs, Shape};
use lockstep_plan::reduction::{Gather, PolicyInputs, RankReductions, ReductionPolicy};
use lockstep_plan::{Compression, Mesh, Recompute::Full, Recompute::Selective};

const SEQ: usize = 12;
const SAMPLES: usize = 8;

/// Slots of each expert in the previous step, in every layer.
const PREVIOUS: [u64; 6] = [70, 10, 32, 80, 5, 41];

fn shape(change: impl Fn(&mut Moe)) -> Shape {
    let mut moe = Moe {
        experts: 4,
        top_k: 2,
        capacity: None,
        aux_loss: 0.5,
        balance: Balance::Sequence,
        z_loss: 0.1,
        shared: 0,
    };
    change(&mut moe);
    Shape {
        family: Family::Moe,
        vocab: 37,
        dim: 16,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        ffn: 24,
        seq: SEQ,
        tied: false,
        norm_eps: 1e-5,
        dropout: 0.0,
        rope_theta: 10_000.0,
        rope_scaling: None,
        moe: Some(moe),
        latent: None,
        lead: None,
    }
}

/// Layout and settings of a training step.
#[derive(Clone, Copy)]
struct How {
    mesh: Mesh,
    sequence: bool,
    recompute: Recompute,
    /// Micro-batches of each data rank.
    micros: usize,
    dtype: Dtype,
    defer_weight_grads: bool,
    /// ZeRO level.
    zero: u8,
}

const ALONE: How = How {
    mesh: Mesh::ONE,
    sequence: false,
    recompute: Recompute::None,
    micros: 1,
    dtype: Dtype::F32,
    defer_weight_grads: false,
    zero: 0,
};

/// Results of a training step on one rank.
struct Found {
    /// Cross-entropy, auxiliary loss, dropped slots: summed over one rank of each tensor group, those of the global batch.
    sums: [f64; 3],
    /// Gradients of this rank's parameters; NaN where ZeRO stores the sum on another rank.
    pieces: Vec<(Param, Vec<f32>)>,
}

/// Reads the needed elements of a tensor out of the whole tensor that `fill` writes.
fn out_of_whole(fill: impl Fn(&Param, &mut [f32])) -> impl FnMut(&Param, &[Runs], &mut [f32]) {
    move |param, runs, out| {
        let mut whole = vec![0.0; param.whole.dims.iter().product()];
        fill(param, &mut whole);
        let elements = runs.iter().flat_map(|runs| runs.ranges()).flatten();
        out.iter_mut().zip(elements).for_each(|(out, element)| *out = whole[element]);
    }
}

/// Values large enough that every path contributes, as a function of the whole tensor.
fn fill(param: &Param, values: &mut [f32]) {
    let (number, gain) = (param.whole.number, param.dims.len() == 1);
    for (i, value) in values.iter_mut().enumerate() {
        let mixed = (number * 1_000_003 + i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let uniform = (mixed >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
        *value = if gain { 1.0 + 0.3 * uniform } else { 0.6 * uniform };
    }
}

/// Sequence `index` of the global batch, and the target of its last token.
fn sample(index: usize) -> impl Iterator<Item = u32> {
    (0..=SEQ).map(move |i| ((index * 31 + i * i * 7 + 3 * i * (index % 3 + 1)) % 37) as u32)
}

fn step(
    world: World,
    shape: &Shape,
    how: How,
    moved: &(dyn Fn(&Param, &mut [f32]) + Sync),
) -> Found {
    let How { mesh, sequence, recompute, micros, dtype, defer_weight_grads, zero } = how;
    let device = Device::from_env(1);
    let groups = Groups::new(&world, &mesh, sequence).unwrap();
    let part = Part::new(&mesh, groups.coord, 1, shape.blocks());
    let model = Model::new(shape, &part);
    let policy = ReductionPolicy::new(PolicyInputs {
        zero,
        replicas: mesh.replicas(),
        micro_batches: micros,
        ..PolicyInputs::ONE_RANK
    });
    let weights = Weights::load(
        &device,
        &part,
        Storage::on_device(dtype, policy.gather),
        out_of_whole(|param, values| {
            fill(param, values);
            moved(param, values);
        }),
    );
    let compression = Compression::None;
    let reductions =
        RankReductions::new(policy, &part, 0).with_shared_sums(&part, sequence, compression);
    let options = StoreOptions { reductions, gradients: Dtype::F32, compression };
    let mut store = Store::new(&device, &groups, &part, weights, options);
    let moe = shape.moe.unwrap();
    let previous = &PREVIOUS[..moe.experts];
    let mut loads = ExpertLoads::new(&device, shape).unwrap();
    loads.begin(&device, &previous.repeat(shape.layers));
    let pass = &Pass {
        device: &device,
        groups: &groups,
        dtype,
        recompute,
        dropout: None,
        global_tokens: SAMPLES * SEQ,
        loads: Some(&loads),
        offload: Offloading::default(),
        fp8: None,
    };
    let each = SAMPLES / mesh.data / micros;
    let mut batch = Batch::empty(&device, each, SEQ);
    let (mut sums, mut activations) = ([0.0; 3], Activations::default());
    for micro in 0..micros {
        let first = (groups.coord.data * micros + micro) * each;
        let samples: Vec<u32> = (first..first + each).flat_map(sample).collect();
        batch.fill(&device, &samples);
        let at = StagePass { stage: 0, pass, batch: &batch, defer_weight_grads };
        model.forward(&at, None, &mut store.weights, &mut activations);
        let (_, loss) = model.backward(&at, None, &mut store, &mut activations);
        let loss = loss.wait();
        model.deferred_weight_grads(pass, &mut store, &mut activations);
        sums[0] += loss.sum;
        sums[1] += loss.auxiliary * loss.tokens as f64 / pass.global_tokens as f64;
        sums[2] += activations.auxiliary.borrow().dropped as f64;
    }
    store.finish(&device, &groups).unwrap();
    let mut of_step = vec![0.0; 2 * moe.experts * shape.layers];
    let global_tokens = pass.global_tokens as f64;
    loads.read(&device, &mut of_step);
    if moe.balance == Balance::Batch {
        // The objective whose gradient is computed: the fractions are those of the previous step.
        let tokens = previous.iter().sum::<u64>() as f64 / moe.top_k as f64;
        for probs in of_step.chunks_exact(2 * moe.experts).map(|layer| &layer[moe.experts..]) {
            let pairs = previous.iter().zip(probs);
            let both = pairs.map(|(&slots, sum)| slots as f64 / tokens * (sum / global_tokens));
            let loss = moe.experts as f64 * both.sum::<f64>();
            sums[1] += moe.aux_loss * loss / shape.layers as f64;
        }
    }
    let mut pieces = Vec::new();
    for (block, layout) in part.blocks.iter().enumerate() {
        let mut gradient = vec![f32::NAN; layout.len()];
        for (unit, shard) in part.shards[block].iter().enumerate() {
            let own = store.gradients.own(block, unit).unwrap();
            device.read(own, &mut gradient[shard.own.clone()]);
        }
        for (start, param) in layout.placed() {
            pieces.push((param.clone(), gradient[start..start + param.len()].to_vec()));
        }
    }
    Found { sums, pieces }
}

fn train(shape: &Shape, how: How) -> Vec<Found> {
    on_threads(how.mesh.ranks(), |world| step(world, shape, how, &|_, _| {}))
}

fn sums(found: &[Found], mesh: &Mesh) -> [f64; 3] {
    let mut all = [0.0; 3];
    for (rank, found) in found.iter().enumerate() {
        if mesh.coord(rank).tensor == 0 {
            all.iter_mut().zip(found.sums).for_each(|(all, one)| *all += one);
        }
    }
    all
}

/// The largest difference of any gradient, relative to the largest in its tensor.
fn apart(whole: &Found, parts: &[Found]) -> f32 {
    let right: HashMap<&str, &Vec<f32>> =
        whole.pieces.iter().map(|(param, values)| (param.whole.name.as_str(), values)).collect();
    let mut seen: HashMap<&str, usize> = HashMap::new();
    let mut worst = 0f32;
    for (param, values) in parts.iter().flat_map(|found| &found.pieces) {
        let right = right[param.whole.name.as_str()];
        let largest = right.iter().fold(0f32, |most, x| most.max(x.abs()));
        for (first, run) in param.runs() {
            let pairs = values[run.clone()].iter().zip(&right[first..first + run.len()]);
            for (ours, right) in pairs.filter(|(ours, _)| !ours.is_nan()) {
                *seen.entry(&param.whole.name).or_default() += 1;
                worst = worst.max((ours - right).abs() / largest.max(1e-12));
            }
        }
    }
    for (name, values) in &right {
        assert!(seen[name] >= values.len(), "{name}: a rank has each element");
    }
    worst
}

fn same(what: &str, shape: &Shape, how: How) {
    let tolerance = 1e-5;
    let whole = train(shape, ALONE).remove(0);
    let parts = train(shape, how);
    let (right, ours) = (whole.sums, sums(&parts, &how.mesh));
    for i in 0..2 {
        let error = (ours[i] / right[i] - 1.0).abs();
        assert!(error < tolerance, "{what}: {ours:?}, alone {right:?}");
    }
    assert_eq!(ours[2], right[2], "{what}: drops");
    let worst = apart(&whole, &parts);
    println!("{what}: gradients at most {worst:.1e} apart");
    assert!((worst as f64) < tolerance, "{what}: gradients {worst:.1e} apart");
}

fn on(data: usize, expert: usize) -> How {
    How { mesh: Mesh { data, expert, ..Mesh::ONE }, ..ALONE }
}

#[test]
fn expert_parallel_equals_one_rank() {
    let shape = shape(|_| {});
    for (data, expert) in [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)] {
        same(&format!("data={data} expert={expert}"), &shape, on(data, expert));
    }
}

/// Six experts on four ranks: two ranks have two, two have one.
#[test]
fn experts_may_be_divided_unevenly() {
    let shape = shape(|moe| moe.experts = 6);
    same("experts=6 expert=4", &shape, on(4, 4));
}

#[test]
fn accumulation_equals_one_micro_batch() {
    let shape = shape(|moe| moe.capacity = Some(0.8));
    same("four micro-batches", &shape, How { micros: 4, ..ALONE });
    same("two on each of two", &shape, How { micros: 2, ..on(2, 2) });
}

#[test]
fn with_tensor_parallelism() {
    let shape = shape(|moe| moe.shared = 1);
    for sequence in [false, true] {
        let mesh = Mesh { data: 2, expert: 2, tensor: 2, ..Mesh::ONE };
        same(&format!("tensor=2 sequence={sequence}"), &shape, How { mesh, sequence, ..ALONE });
        let mesh = Mesh { data: 1, tensor: 2, ..Mesh::ONE };
        same(&format!("tensor=2 alone, {sequence}"), &shape, How { mesh, sequence, ..ALONE });
    }
}

#[test]
fn with_capacity_the_same_slots_are_dropped() {
    let tight = shape(|moe| moe.capacity = Some(0.7));
    assert!(train(&tight, ALONE)[0].sums[2] > 0.0, "slots are dropped");
    for (data, expert) in [(2, 1), (4, 2), (4, 4), (8, 4)] {
        same(&format!("capacity, data={data} expert={expert}"), &tight, on(data, expert));
    }
}

#[test]
fn recompute_equals_saved_activations() {
    for (shared, recompute) in [(0, Selective), (1, Selective), (0, Full), (1, Full)] {
        let shape = shape(|moe| moe.shared = shared);
        let what = format!("{recompute:?}, shared={shared}");
        same(&format!("{what} alone"), &shape, How { recompute, ..ALONE });
        same(&what, &shape, How { recompute, ..on(4, 2) });
    }
}

#[test]
fn weight_gradients_may_be_deferred() {
    let shape = shape(|moe| moe.shared = 1);
    same("deferred", &shape, How { defer_weight_grads: true, ..on(4, 2) });
}

/// Optimizer state of experts is sharded among the ranks with the same experts, other state among all replicas.
#[test]
fn with_zero() {
    let shape = shape(|moe| moe.shared = 1);
    for zero in 1..=3 {
        for (expert, shard) in [(1, 4), (2, 4), (4, 4), (2, 2)] {
            let mesh = Mesh { data: 4, expert, shard, ..Mesh::ONE };
            let what = format!("zero={zero} expert={expert} shard={shard}");
            same(&what, &shape, How { mesh, zero, micros: 2, ..ALONE });
        }
    }
}

#[test]
fn shared_experts_process_all_tokens() {
    let shape = shape(|moe| moe.shared = 2);
    same("shared=2", &shape, on(4, 2));
}

/// Each stage reports the auxiliary losses of its own layers.
#[test]
fn auxiliary_losses_of_stages_add_up() {
    let shape = shape(|moe| moe.capacity = Some(0.7));
    let whole = train(&shape, ALONE).remove(0);
    let (device, groups) = (Device::from_env(1), Groups::alone());
    let part = Part::new(&Mesh::ONE, groups.coord, 2, shape.blocks());
    let model = Model::new(&shape, &part);
    let storage = Storage::on_device(Dtype::F32, Gather::Never);
    let weights = Weights::load(&device, &part, storage, out_of_whole(fill));
    let mut store = Store::on_one_rank(&device, &part, weights);
    let How { recompute, dtype, defer_weight_grads, .. } = ALONE;
    let global_tokens = SAMPLES * SEQ;
    let (device, groups) = (&device, &groups);
    let pass = &Pass {
        device,
        groups,
        dtype,
        recompute,
        dropout: None,
        global_tokens,
        loads: None,
        offload: Offloading::default(),
        fp8: None,
    };
    let mut batch = Batch::empty(device, SAMPLES, SEQ);
    batch.fill(device, &(0..SAMPLES).flat_map(sample).collect::<Vec<_>>());

    let mut saved = [Activations::default(), Activations::default()];
    let at = |stage| StagePass { stage, pass, batch: &batch, defer_weight_grads };
    let x = model.forward(&at(0), None, &mut store.weights, &mut saved[0]);
    model.forward(&at(1), x, &mut store.weights, &mut saved[1]);
    let (dx, last) = model.backward(&at(1), None, &mut store, &mut saved[1]);
    let (_, first) = model.backward(&at(0), dx, &mut store, &mut saved[0]);
    let (first, last) = (first.wait(), last.wait());
    assert!(first.auxiliary > 0.0 && last.auxiliary > 0.0);
    let auxiliary = first.auxiliary + last.auxiliary;
    assert!((auxiliary / whole.sums[1] - 1.0).abs() < 1e-12, "{auxiliary}, {:?}", whole.sums);
    for (block, layout) in part.blocks.iter().enumerate() {
        let ours = device.to_vec::<f32>(store.gradients.get(block).unwrap());
        for (start, param) in layout.placed() {
            let is_it = |(other, _): &&(Param, Vec<f32>)| other.whole.name == param.whole.name;
            let (_, right) = whole.pieces.iter().find(is_it).unwrap();
            assert_eq!(&ours[start..start + param.len()], &right[..], "{}", param.whole.name);
        }
    }
}

/// The scope is the global batch, on any number of replicas and micro-batches.
#[test]
fn balance_over_the_batch_does_not_depend_on_the_layout() {
    let shape = shape(|moe| moe.balance = Balance::Batch);
    for (data, expert) in [(2, 1), (4, 1), (4, 4)] {
        same(&format!("batch, data={data} expert={expert}"), &shape, on(data, expert));
    }
    same("batch, four micro-batches", &shape, How { micros: 4, ..ALONE });
    same("batch, two micro-batches on each of two", &shape, How { micros: 2, ..on(2, 2) });
    same("batch, recompute", &shape, How { recompute: Full, micros: 2, ..on(2, 1) });
    let mesh = Mesh { data: 2, tensor: 2, ..Mesh::ONE };
    same("batch, tensor=2", &shape, How { mesh, sequence: true, micros: 2, ..ALONE });
}

/// Among logits s, -s, t, -t and 0 the last is never in the top two, so the fifth expert, alone on its rank, gets no
/// tokens. Its gradient is written as zero.
#[test]
fn an_expert_without_tokens_has_a_zero_gradient() {
    let shape = shape(|moe| moe.experts = 5);
    let away = |param: &Param, values: &mut [f32]| {
        if param.name == "router.weight" {
            let cols = param.dims[1];
            for j in 0..cols {
                values[cols + j] = -values[j];
                values[3 * cols + j] = -values[2 * cols + j];
                values[4 * cols + j] = 0.0;
            }
        }
    };
    let train = |how: How| on_threads(how.mesh.ranks(), |world| step(world, &shape, how, &away));
    let alone = train(ALONE).remove(0);
    for how in [on(2, 2), on(4, 4)] {
        let found = train(how);
        assert!(apart(&alone, &found) < 1e-5, "{:?}", how.mesh);
        let pieces = || found.iter().flat_map(|found| &found.pieces);
        for (param, values) in pieces().filter(|(param, _)| param.expert.is_some()) {
            let none = values.iter().all(|x| *x == 0.0);
            assert_eq!(none, param.expert == Some(4), "{}", param.whole.name);
        }
    }
}

#[test]
fn bf16_is_close_to_one_rank_and_deterministic() {
    let shape = shape(|moe| moe.shared = 1);
    let how = How { dtype: Dtype::Bf16, ..on(4, 2) };
    let (once, again) = (train(&shape, how), train(&shape, how));
    for (once, again) in once.iter().zip(&again) {
        assert_eq!(once.sums, again.sums);
        for ((param, once), (_, again)) in once.pieces.iter().zip(&again.pieces) {
            assert_eq!(once, again, "{}", param.whole.name);
        }
    }
    let alone = train(&shape, How { dtype: Dtype::Bf16, ..ALONE }).remove(0);
    let (ours, right) = (sums(&once, &how.mesh), alone.sums);
    assert!((ours[0] / right[0] - 1.0).abs() < 1e-2, "{ours:?} against {right:?}");
    // Rounding may change the choice of a token between two experts, so single gradients are not compared.
}

/// The gradient of the balance loss is the slope of the reported loss.
#[test]
fn the_balance_gradient_matches_finite_differences() {
    for balance in [Balance::Sequence, Balance::Batch] {
        let with = |aux_loss| {
            shape(|moe| (moe.aux_loss, moe.z_loss, moe.balance) = (aux_loss, 0.0, balance))
        };
        for how in [ALONE, on(2, 2)] {
            let [on_, off] = [with(1.0), with(0.0)].map(|shape| train(&shape, how));
            // The direction of its own gradient.
            let mut direction: HashMap<String, Vec<f32>> = HashMap::new();
            for ((param, on_), (_, off)) in on_
                .iter()
                .flat_map(|found| &found.pieces)
                .zip(off.iter().flat_map(|found| &found.pieces))
            {
                let only = on_.iter().zip(off).map(|(on_, off)| on_ - off).collect();
                direction.insert(param.whole.name.clone(), only);
            }
            let squares: f64 =
                direction.values().flatten().map(|&slope| (slope as f64).powi(2)).sum();
            let at = |distance: f64| {
                let shape = with(1.0);
                let moved = |param: &Param, values: &mut [f32]| {
                    let slopes = &direction[&param.whole.name];
                    let by = distance / squares.sqrt();
                    values.iter_mut().zip(slopes).for_each(|(x, slope)| {
                        *x += (by * *slope as f64) as f32;
                    });
                };
                let found = on_threads(how.mesh.ranks(), |world| step(world, &shape, how, &moved));
                sums(&found, &how.mesh)[1]
            };
            let distance = 1e-3;
            let slope = (at(distance) - at(-distance)) / (2.0 * distance);
            let error = (slope / squares.sqrt() - 1.0).abs();
            println!("{balance:?}: slope {slope:.5}, gradient {:.5}", squares.sqrt());
            assert!(error < 5e-3, "{balance:?}: slope {slope}, gradient {}", squares.sqrt());
        }
    }
}
