//! Gradients of whole models, compared with finite differences and between modes of the passes.

use lockstep_kernels::{Device, DeviceType, Dtype, RandomKey, Tag, Tensor};
use lockstep_model::{
    Activations, Ctx, Dropout, Loss, Recompute, Slot, StagePass, Transformer, WeightGrads,
};
use lockstep_plan::context::Run;
use lockstep_plan::model::{Family, Moe, Shape};

use crate::setup::{BATCH, PLAIN, SEQ, Setup, Way, all_gradients, objective, setup, shape, train};

const FAMILIES: [Family; 3] = [Family::Gpt2, Family::Llama, Family::Moe];

/// Every token goes to every expert, because the loss is discontinuous where a token's choice changes.
fn smooth(family: Family) -> Shape {
    let mut shape = shape(family);
    shape.moe = shape.moe.map(|moe| Moe { top_k: moe.experts, ..moe });
    shape
}

/// Moves every parameter by `step` times its gradient.
pub fn moved(setup: &mut Setup, gradient: &[f32], step: f32) {
    let mut rest = gradient;
    for block in 0..setup.store.weights.blocks() {
        for unit in 0..setup.store.weights.shards(block).count() {
            let (master, _) = setup.store.weights.own_mut(block, unit);
            let mut values = setup.device.to_vec::<f32>(master.as_view());
            let (here, after) = rest.split_at(values.len());
            values.iter_mut().zip(here).for_each(|(value, slope)| *value += step * slope);
            setup.device.write(master, &values);
            rest = after;
        }
    }
    assert!(rest.is_empty(), "there are as many gradients as parameters");
}

/// The slope of the loss along the gradient is the gradient's square: one number that all gradients enter.
#[test]
fn gradients_match_finite_differences() {
    for family in FAMILIES {
        for dropout in [0.0, 0.2] {
            let shape = smooth(family);
            let way = Way {
                dropout: (dropout > 0.0).then_some(Dropout {
                    probability: dropout,
                    seed: 3,
                    step: 5,
                    first_sample: 4,
                    seq: SEQ as u64,
                }),
                ..PLAIN
            };
            let (slope, square) = slope(&mut setup(&shape, Dtype::F32), &way);
            let error = (slope / square - 1.0).abs();
            assert!(error < 2e-3, "{family:?} dropout {dropout}: {slope} against {square}");
        }
    }
}

/// The measured slope of the loss along the gradient, and the expected one: the gradient's square.
pub fn slope(setup: &mut Setup, way: &Way) -> (f64, f64) {
    let (gradient, _) = train(setup, way, 1);
    let square: f64 = gradient.iter().map(|g| (*g as f64).powi(2)).sum();
    // A change of the loss of about ±0.01, far above rounding.
    let step = (0.01 / square) as f32;
    moved(setup, &gradient, step);
    let above = objective(&train(setup, way, 1).1);
    moved(setup, &gradient, -2.0 * step);
    let below = objective(&train(setup, way, 1).1);
    ((above - below) / (2.0 * step as f64), square)
}

/// The same for single tensors, so that a large gradient does not hide an error in a small one.
#[test]
fn gradients_of_each_tensor_match_finite_differences() {
    for family in FAMILIES {
        let shape = smooth(family);
        let mut setup = setup(&shape, Dtype::F32);
        let (gradient, _) = train(&mut setup, &PLAIN, 1);
        let mut end = 0;
        let tensors: Vec<_> = setup
            .model
            .part
            .blocks
            .iter()
            .flat_map(|block| &block.params)
            .map(|param| {
                end += param.len();
                (param.whole.name.clone(), end - param.len()..end)
            })
            .collect();
        assert_eq!(end, gradient.len());
        for (name, place) in tensors {
            let mut only = vec![0.0; gradient.len()];
            only[place.clone()].copy_from_slice(&gradient[place]);
            let square: f64 = only.iter().map(|g| (*g as f64).powi(2)).sum();
            if square < 1e-9 {
                continue; // such as a bias of keys, which softmax cancels
            }
            let step = (2e-3 / square) as f32;
            moved(&mut setup, &only, step);
            let above = objective(&train(&mut setup, &PLAIN, 1).1);
            moved(&mut setup, &only, -2.0 * step);
            let below = objective(&train(&mut setup, &PLAIN, 1).1);
            moved(&mut setup, &only, step);
            let slope = (above - below) / (2.0 * step as f64);
            assert!(
                (slope / square - 1.0).abs() < 3e-2,
                "{family:?} {name}: {slope} against {square}"
            );
        }
    }
}

/// Whether two gradients are equal up to the rounding of a type, relative to the largest element.
fn nearly(a: &[f32], b: &[f32], dtype: Dtype) -> bool {
    let tolerance = if dtype == Dtype::F32 { 1e-5 } else { 2e-2 };
    let largest = a.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    a.iter().zip(b).all(|(a, b)| (a - b).abs() <= tolerance * largest)
}

#[test]
fn recompute_gives_the_same_bits() {
    for family in FAMILIES {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let mut setup = setup(&shape(family), dtype);
            let on_gpu = setup.device.device_type() == DeviceType::Cuda;
            let mut with = |recompute| train(&mut setup, &Way { recompute, dtype, ..PLAIN }, 1);
            let saved = with(Recompute::None);
            for recompute in [Recompute::Selective, Recompute::Full] {
                let again = with(recompute);
                let same = match on_gpu {
                    false => saved == again,
                    // A GPU's multiply with a GELU sums in another order than the one without.
                    true => nearly(&saved.0, &again.0, dtype),
                };
                assert!(same, "{family:?} {dtype} {recompute:?}");
            }
        }
    }
}

#[test]
fn micro_batches_accumulate_gradients() {
    for family in FAMILIES {
        let mut setup = setup(&shape(family), Dtype::F32);
        let (once, _) = train(&mut setup, &PLAIN, 1);
        let (twice, _) = train(&mut setup, &PLAIN, 2);
        for (index, (once, twice)) in once.iter().zip(&twice).enumerate() {
            let error = (2.0 * once - twice).abs();
            assert!(
                error <= 1e-5 * once.abs().max(1e-2),
                "{family:?} {index}: {once} then {twice}"
            );
        }
    }
}

/// Slots beyond an expert's capacity are dropped in the order of the tokens; gradients are those of the others.
#[test]
fn gradients_are_right_when_slots_are_dropped() {
    let roomy = smooth(Family::Moe);
    let moe = roomy.moe.expect("a mixture of experts");
    let tight = Shape { moe: Some(Moe { capacity: Some(0.5), ..moe }), ..roomy.clone() };
    // Every token chooses every expert, so half the capacity takes half of the slots.
    let slots = (roomy.layers * BATCH * SEQ * moe.experts) as u64;
    assert_eq!((dropped(&roomy), dropped(&tight)), (0, slots / 2));

    let loss = |shape| train(&mut setup(shape, Dtype::F32), &PLAIN, 1).1.sum;
    assert!(loss(&roomy) != loss(&tight), "dropped slots change the loss");
    let (slope, square) = slope(&mut setup(&tight, Dtype::F32), &PLAIN);
    assert!((slope / square - 1.0).abs() < 2e-3, "{slope} against {square}");
}

/// Slots that a pass drops.
fn dropped(shape: &Shape) -> u64 {
    let Setup { device, groups, model, mut store, batch } = setup(shape, Dtype::F32);
    let mut activations = Activations::default();
    model.train(&PLAIN.pass(&device, &groups), &batch, &mut store, &mut activations);
    activations.auxiliary.borrow().dropped
}

#[test]
fn bf16_is_close_to_f32() {
    for family in FAMILIES {
        let mut f32_setup = setup(&shape(family), Dtype::F32);
        let mut bf16_setup = setup(&shape(family), Dtype::Bf16);
        let (exact, exact_loss) = train(&mut f32_setup, &PLAIN, 1);
        let (rounded, rounded_loss) =
            train(&mut bf16_setup, &Way { dtype: Dtype::Bf16, ..PLAIN }, 1);
        let distance: f64 = exact.iter().zip(&rounded).map(|(a, b)| ((a - b) as f64).powi(2)).sum();
        let size: f64 = exact.iter().map(|a| (*a as f64).powi(2)).sum();
        let error = (distance / size).sqrt();
        assert!(error < 0.1, "{family:?}: gradients {error} apart");
        let loss = (exact_loss.sum / rounded_loss.sum - 1.0).abs();
        assert!(loss < 0.02, "{family:?}: losses {loss} apart");
    }
}

/// A zero-bubble schedule first computes the gradient of a layer's input, later those of its weights.
#[test]
fn deferred_weight_gradients_of_a_layer_are_the_same() {
    for family in FAMILIES {
        let shape = smooth(family);
        let setup = setup(&shape, Dtype::F32);
        let part = &setup.model.part;
        let layer = Transformer::new(&shape, part).block(&part.blocks[1]);
        let device = &setup.device;
        let runs = [Run { start: 0, len: SEQ }];
        let cx = Ctx {
            device,
            groups: &setup.groups,
            weights: setup.store.weights.block(1),
            shared: None,
            dtype: Dtype::F32,
            recompute: Recompute::None,
            batch: BATCH,
            runs: &runs,
            inputs: setup.batch.inputs.view(),
            targets: None,
            loss_scale: 1.0,
            dropout: None,
            share: 1.0,
            auxiliary: None,
            loads: None,
            recomputing: false,
            fp8: None,
        };
        let random = |stream| random(device, shape.dim, stream);
        let len = layer.params().len();
        let mut immediate = device.zeros(1, len, Dtype::F32, Tag::Gradients);
        let mut later = device.zeros(1, len, Dtype::F32, Tag::Gradients);
        let mut saved = Slot::default();

        layer.forward(&cx, random(1), &mut saved);
        let mut grads = WeightGrads::new(device, immediate.view_mut(), false);
        let dx = layer.backward(&cx, &mut saved, random(2), &mut grads).unwrap();

        let mut deferred = Vec::new();
        layer.forward(&cx, random(1), &mut saved);
        let grads = WeightGrads::new(device, later.view_mut(), false);
        let same_dx =
            layer.backward(&cx, &mut saved, random(2), &mut grads.deferring(&mut deferred));
        let values = |tensor: &Tensor| device.to_vec::<f32>(tensor.view());
        assert!(values(&dx) == values(&same_dx.unwrap()), "{family:?}: gradients of the input");
        assert!(values(&immediate) != values(&later), "{family:?}: nothing was deferred");
        deferred.iter().for_each(|work| work.run(device, later.view_mut()));
        assert!(values(&immediate) == values(&later), "{family:?}: gradients of the weights");
    }
}

fn random(device: &Device, dim: usize, stream: u64) -> Tensor {
    let mut x = device.empty(BATCH * SEQ, dim, Dtype::F32, Tag::Buffers);
    device.normal(x.view_mut(), RandomKey { seed: 1, stream }, 0, 1.0);
    x
}

/// The same for a whole model, with two micro-batches in flight.
#[test]
fn deferred_weight_gradients_of_a_model_are_the_same() {
    for family in FAMILIES {
        let immediate = train(&mut setup(&shape(family), Dtype::F32), &PLAIN, 2);
        let Setup { device, groups, model, mut store, batch } = setup(&shape(family), Dtype::F32);
        let pass = &PLAIN.pass(&device, &groups);
        let at = StagePass { stage: 0, pass, batch: &batch, defer_weight_grads: true };
        let mut loss = Loss::default();
        let mut in_flight = [Activations::default(), Activations::default()];
        for activations in &mut in_flight {
            model.forward(&at, None, &mut store.weights, activations);
        }
        for activations in &mut in_flight {
            loss = model.backward(&at, None, &mut store, activations).1.wait();
        }
        assert!(all_gradients(&device, &store) != immediate.0, "{family:?}: nothing was deferred");
        for activations in &mut in_flight {
            model.deferred_weight_grads(pass, &mut store, activations);
        }
        assert!((all_gradients(&device, &store), loss) == immediate, "{family:?}");
    }
}
