//! Gradients of whole models.

use std::sync::Arc;

use lockstep_kernels::{Dtype, RopeTable, Tag};
use lockstep_model::{Block, Cx, Dropout, Gradients, Layer, Pass, Recompute, Sink, Tape};
use lockstep_plan::model::{Family, Moe, Shape};

use crate::setup::{BATCH, PASS, SEQ, Setup, objective, setup, shape, train};

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
    for block in 0..setup.weights.blocks() {
        let (master, _) = setup.weights.master_mut(block);
        let values = master.view_mut().host::<f32>();
        let (here, after) = rest.split_at(values.len());
        values.iter_mut().zip(here).for_each(|(value, slope)| *value += step * slope);
        rest = after;
    }
}

/// The loss rises along the gradient by its square: one number that every part of it enters.
#[test]
fn the_loss_follows_the_gradient() {
    for family in FAMILIES {
        for dropout in [0.0, 0.2] {
            let shape = smooth(family);
            let pass = Pass {
                dropout: (dropout > 0.0).then_some(Dropout {
                    probability: dropout,
                    seed: 3,
                    step: 5,
                    first_token: 48,
                }),
                ..PASS
            };
            let (slope, square) = slope(&mut setup(&shape, Dtype::F32), &pass);
            let error = (slope / square - 1.0).abs();
            assert!(error < 2e-3, "{family:?} dropout {dropout}: {slope} against {square}");
        }
    }
}

/// How the loss really changes along the gradient, and how it should: by the gradient's square.
fn slope(setup: &mut Setup, pass: &Pass) -> (f64, f64) {
    let (gradient, _) = train(setup, pass, 1);
    let square: f64 = gradient.iter().map(|g| (*g as f64).powi(2)).sum();
    // A change of the loss of about ±0.01, far above rounding.
    let step = (0.01 / square) as f32;
    moved(setup, &gradient, step);
    let above = objective(&train(setup, pass, 1).1);
    moved(setup, &gradient, -2.0 * step);
    let below = objective(&train(setup, pass, 1).1);
    ((above - below) / (2.0 * step as f64), square)
}

/// The same along single tensors, so that a small one cannot hide behind a large one.
#[test]
fn each_tensor_has_its_gradient() {
    for family in FAMILIES {
        let shape = smooth(family);
        let mut setup = setup(&shape, Dtype::F32);
        let (gradient, _) = train(&setup, &PASS, 1);
        let tensors: Vec<_> =
            setup.weights.tensors().map(|(name, _, block, range)| (name, block, range)).collect();
        let starts: Vec<usize> = setup
            .weights
            .layout
            .iter()
            .scan(0, |end, block| {
                *end += block.len();
                Some(*end - block.len())
            })
            .collect();
        for (name, block, range) in tensors {
            let place = starts[block] + range.start..starts[block] + range.end;
            let mut only = vec![0.0; gradient.len()];
            only[place.clone()].copy_from_slice(&gradient[place]);
            let square: f64 = only.iter().map(|g| (*g as f64).powi(2)).sum();
            if square < 1e-9 {
                continue; // such as a bias of keys, which no softmax sees
            }
            let step = (2e-3 / square) as f32;
            moved(&mut setup, &only, step);
            let above = objective(&train(&setup, &PASS, 1).1);
            moved(&mut setup, &only, -2.0 * step);
            let below = objective(&train(&setup, &PASS, 1).1);
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
            let setup = setup(&shape(family), dtype);
            let with = |recompute| train(&setup, &Pass { recompute, dtype, ..PASS }, 1);
            let kept = with(Recompute::None);
            assert!(kept == with(Recompute::Selective), "{family:?} {dtype} selective");
            assert!(kept == with(Recompute::Full), "{family:?} {dtype} full");
        }
    }
}

#[test]
fn a_second_micro_batch_adds_its_gradients() {
    for family in FAMILIES {
        let setup = setup(&shape(family), Dtype::F32);
        let (once, _) = train(&setup, &PASS, 1);
        let (twice, _) = train(&setup, &PASS, 2);
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

    let loss = |shape| train(&setup(shape, Dtype::F32), &PASS, 1).1.sum;
    assert!(loss(&roomy) != loss(&tight), "what was dropped is missing");
    let (slope, square) = slope(&mut setup(&tight, Dtype::F32), &PASS);
    assert!((slope / square - 1.0).abs() < 2e-3, "{slope} against {square}");
}

/// Slots that found no room in a pass.
fn dropped(shape: &Shape) -> u64 {
    let Setup { device, model, weights, batch } = setup(shape, Dtype::F32);
    let (mut gradients, mut tape) = (Gradients::new(model.blocks()), Tape::default());
    model.train(&device, &weights, &batch, &PASS, &mut gradients, &mut tape);
    tape.auxiliary.borrow().dropped
}

#[test]
fn bf16_stays_near_f32() {
    for family in FAMILIES {
        let wide = setup(&shape(family), Dtype::F32);
        let narrow = setup(&shape(family), Dtype::Bf16);
        let (exact, exact_loss) = train(&wide, &PASS, 1);
        let (rounded, rounded_loss) = train(&narrow, &Pass { dtype: Dtype::Bf16, ..PASS }, 1);
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
        let setup = setup(&smooth(family), Dtype::F32);
        let layer = Layer::new(&setup.model.shape, 0, rope(&setup));
        let (device, weights) = (&setup.device, setup.weights.block(1));
        let cx = Cx {
            device,
            dtype: Dtype::F32,
            batch: BATCH,
            seq: SEQ,
            dropout: None,
            share: 1.0,
            auxiliary: None,
            counting: false,
        };
        let random = |stream| {
            let mut x = device.empty(BATCH * SEQ, setup.model.shape.dim, Dtype::F32, Tag::Buffers);
            device.normal(x.view_mut(), 1, stream, 0, 1.0);
            x
        };
        let len = layer.params().len();
        let mut at_once = device.zeros(1, len, Dtype::F32, Tag::Gradients);
        let mut in_two = device.zeros(1, len, Dtype::F32, Tag::Gradients);

        let (_, saved) = layer.forward(&cx, weights, random(1), Recompute::None);
        let mut sink = Sink::now(at_once.view_mut(), false);
        let dx = layer.backward(&cx, weights, saved, random(2), &mut sink);

        let mut later = Vec::new();
        let (_, saved) = layer.forward(&cx, weights, random(1), Recompute::None);
        let mut sink = Sink::later(in_two.view_mut(), false, &mut later);
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

fn rope(setup: &Setup) -> Option<Arc<RopeTable>> {
    let shape = &setup.model.shape;
    (shape.family != Family::Gpt2)
        .then(|| Arc::new(RopeTable::new(shape.head_dim, shape.seq, shape.rope_theta, None)))
}
