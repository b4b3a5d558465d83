//! Gradients of whole models.

use std::sync::Arc;

use lockstep_kernels::{Dtype, RopeTable, Tag};
use lockstep_model::{
    Activations, Block, Ctx, Dropout, Layer, Loss, Recompute, WeightGradients, WeightGrads,
};
use lockstep_plan::context::Run;
use lockstep_plan::model::{Family, Moe, Shape};

use crate::setup::{BATCH, PLAIN, SEQ, Setup, Way, all_gradients, objective, setup, shape, train};

const FAMILIES: [Family; 3] = [Family::Gpt2, Family::Llama, Family::Moe];

/// Every token meets every expert: where a token's choice changes, the loss jumps.
fn smooth(family: Family) -> Shape {
    let mut shape = shape(family);
    shape.moe = shape.moe.map(|moe| Moe { top_k: moe.experts, ..moe });
    shape
}

/// Moves every parameter by `step` times its gradient.
fn moved(setup: &mut Setup, gradient: &[f32], step: f32) {
    let mut rest = gradient;
    for block in 0..setup.store.weights.blocks() {
        for unit in 0..setup.store.weights.shards(block).count() {
            let (master, _) = setup.store.weights.own_mut(block, unit);
            let values = master.host::<f32>();
            let (here, after) = rest.split_at(values.len());
            values.iter_mut().zip(here).for_each(|(value, slope)| *value += step * slope);
            rest = after;
        }
    }
    assert!(rest.is_empty(), "every parameter has a gradient, and every gradient a parameter");
}

/// The loss rises along the gradient by its square: one number that every part of it enters.
#[test]
fn the_loss_follows_the_gradient() {
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

/// How the loss really changes along the gradient, and how it should: by the gradient's square.
fn slope(setup: &mut Setup, way: &Way) -> (f64, f64) {
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

/// The same along single tensors, so that a small one cannot hide behind a large one.
#[test]
fn each_tensor_has_its_gradient() {
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
                continue; // such as a bias of keys, which no softmax sees
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

#[test]
fn what_is_recomputed_is_the_same_to_the_bit() {
    for family in FAMILIES {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let mut setup = setup(&shape(family), dtype);
            let mut with = |recompute| train(&mut setup, &Way { recompute, dtype, ..PLAIN }, 1);
            let kept = with(Recompute::None);
            assert!(kept == with(Recompute::Selective), "{family:?} {dtype} selective");
            assert!(kept == with(Recompute::Full), "{family:?} {dtype} full");
        }
    }
}

#[test]
fn a_second_micro_batch_adds_its_gradients() {
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

/// Slots beyond an expert's room are dropped, in the order of the tokens, and the gradient is that of what is left.
#[test]
fn experts_with_little_room_drop_and_still_learn() {
    let roomy = smooth(Family::Moe);
    let moe = roomy.moe.expect("a mixture of experts");
    let tight = Shape { moe: Some(Moe { capacity: Some(0.5), ..moe }), ..roomy.clone() };
    // Everybody chooses every expert, so half the room takes half of the slots.
    let slots = (roomy.layers * BATCH * SEQ * moe.experts) as u64;
    assert_eq!((dropped(&roomy), dropped(&tight)), (0, slots / 2));

    let loss = |shape| train(&mut setup(shape, Dtype::F32), &PLAIN, 1).1.sum;
    assert!(loss(&roomy) != loss(&tight), "what was dropped is missing");
    let (slope, square) = slope(&mut setup(&tight, Dtype::F32), &PLAIN);
    assert!((slope / square - 1.0).abs() < 2e-3, "{slope} against {square}");
}

/// Slots that found no room in a pass.
fn dropped(shape: &Shape) -> u64 {
    let Setup { device, groups, model, mut store, batch } = setup(shape, Dtype::F32);
    let mut kept = Activations::default();
    model.train(&PLAIN.pass(&device, &groups), &batch, &mut store, &mut kept);
    kept.auxiliary.borrow().dropped
}

#[test]
fn bf16_stays_near_f32() {
    for family in FAMILIES {
        let mut wide = setup(&shape(family), Dtype::F32);
        let mut narrow = setup(&shape(family), Dtype::Bf16);
        let (exact, exact_loss) = train(&mut wide, &PLAIN, 1);
        let (rounded, rounded_loss) = train(&mut narrow, &Way { dtype: Dtype::Bf16, ..PLAIN }, 1);
        let distance: f64 = exact.iter().zip(&rounded).map(|(a, b)| ((a - b) as f64).powi(2)).sum();
        let size: f64 = exact.iter().map(|a| (*a as f64).powi(2)).sum();
        let error = (distance / size).sqrt();
        assert!(error < 0.1, "{family:?}: gradients {error} apart");
        let loss = (exact_loss.sum / rounded_loss.sum - 1.0).abs();
        assert!(loss < 0.02, "{family:?}: losses {loss} apart");
    }
}

/// What a zero-bubble schedule does: first the way back through a layer, later its weights.
#[test]
fn weight_gradients_can_wait() {
    for family in FAMILIES {
        let whole = smooth(family);
        let setup = setup(&whole, Dtype::F32);
        let part = &setup.model.part;
        let layer = Layer::new(&whole, part.blocks[1].clone(), rope(&whole));
        let (device, weights) = (&setup.device, setup.store.weights.block(1));
        let runs = [Run { start: 0, len: SEQ }];
        let cx = Ctx {
            device,
            groups: &setup.groups,
            dtype: Dtype::F32,
            batch: BATCH,
            runs: &runs,
            dropout: None,
            share: 1.0,
            auxiliary: None,
            counting: false,
        };
        let random = |stream| {
            let mut x = device.empty(BATCH * SEQ, whole.dim, Dtype::F32, Tag::Buffers);
            device.normal(x.view_mut(), 1, stream, 0, 1.0);
            x
        };
        let len = layer.params().len();
        let mut at_once = device.zeros(1, len, Dtype::F32, Tag::Gradients);
        let mut in_two = device.zeros(1, len, Dtype::F32, Tag::Gradients);

        let (_, saved) = layer.forward(&cx, weights, random(1), Recompute::None);
        let mut sink = WeightGrads::now(at_once.view_mut(), false);
        let dx = layer.backward(&cx, weights, saved, random(2), &mut sink);

        let mut later = Vec::new();
        let (_, saved) = layer.forward(&cx, weights, random(1), Recompute::None);
        let mut sink = WeightGrads::deferred(in_two.view_mut(), false, &mut later);
        let same_dx = layer.backward(&cx, weights, saved, random(2), &mut sink);
        assert!(
            dx.view().host::<f32>() == same_dx.view().host::<f32>(),
            "{family:?}: the way back"
        );
        assert!(at_once.view().host::<f32>() != in_two.view().host::<f32>(), "{family:?}: not yet");
        later.iter().for_each(|work| work.run(device, in_two.view_mut(), false));
        assert!(
            at_once.view().host::<f32>() == in_two.view().host::<f32>(),
            "{family:?}: the weights"
        );
    }
}

/// The same of a whole model, and of two micro-batches that are both under way.
#[test]
fn whole_models_put_weight_gradients_off() {
    for family in FAMILIES {
        let at_once = train(&mut setup(&shape(family), Dtype::F32), &PLAIN, 2);
        let Setup { device, groups, model, mut store, batch } = setup(&shape(family), Dtype::F32);
        let pass = PLAIN.pass(&device, &groups);
        let mut loss = Loss::default();
        let mut under_way = [Activations::default(), Activations::default()];
        for kept in &mut under_way {
            model.forward(0, &pass, &batch, None, &mut store.weights, kept);
        }
        for kept in &mut under_way {
            let later = WeightGradients::Later;
            loss = model.backward(0, &pass, &batch, None, &mut store, kept, later).1;
        }
        assert!(all_gradients(&store) != at_once.0, "{family:?}: not yet");
        for kept in &mut under_way {
            model.weight_gradients(&pass, &mut store, kept);
        }
        assert!((all_gradients(&store), loss) == at_once, "{family:?}");
    }
}

fn rope(shape: &Shape) -> Option<Arc<RopeTable>> {
    (shape.family != Family::Gpt2)
        .then(|| Arc::new(RopeTable::new(shape.head_dim, shape.seq, shape.rope_theta, None)))
}
