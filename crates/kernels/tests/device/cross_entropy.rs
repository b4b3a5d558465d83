use half::bf16;
use lockstep_kernels::reference::cross_entropy as reference;
use lockstep_kernels::{CrossEntropy, DeviceType, Float, IGNORED, LogitGradient};

use crate::check::*;

/// Rows that fit in the shared memory of a GPU, and rows that do not.
const WIDE: [(usize, usize); 3] = [(5, 50_257), (7, 50_304), (2, 200_003)];

const SCALE: f32 = 0.125;

/// Logits of a wide range, and targets of which every fifth is ignored.
pub fn rows<E: Float>(rows: usize, vocab: usize) -> (Vec<E>, Vec<u32>) {
    let logits = numbers::<f32>(rows * vocab, 1);
    let logits = logits.iter().map(|x| E::round_from(x * 5.0 + 2.0)).collect();
    let mut targets = integers(rows, vocab, 2);
    targets.iter_mut().skip(1).step_by(5).for_each(|target| *target = IGNORED);
    (logits, targets)
}

#[test]
fn f32_logits_match_the_reference() {
    compare::<f32, f32>();
    compare::<f32, bf16>();
}

/// The CPU computes f32 logits only.
#[test]
fn bf16_logits_match_the_reference() {
    if device().device_type() != DeviceType::Cpu {
        compare::<bf16, bf16>();
        compare::<bf16, f32>();
    }
}

/// Logits of type `L`, and gradients of type `G`.
fn compare<L: Float, G: Float>() {
    for ((n, vocab), offset) in
        SHAPES.into_iter().chain(WIDE).flat_map(|shape| OFFSETS.map(|offset| (shape, offset)))
    {
        let (logits, targets) = rows::<L>(n, vocab);
        let losses = reference::losses(&to_f64(&logits), &targets, 0.0);
        let gradient = reference::backward(&to_f64(&logits), &targets, SCALE as f64, 0.0);
        let expected = [losses.clone(), losses.clone(), losses, gradient.clone(), gradient];
        let what = format!("loss ({n}, {vocab}) from {offset}, {} to {}", L::DTYPE, G::DTYPE);
        let bound = tolerance::<L>(3e-6).max(tolerance::<G>(3e-6));
        check(&what, bound, expected, || {
            let targets = Data::row(0, &targets);
            let [mut evaluated, mut in_place, mut from] =
                [(); 3].map(|_| Data::new(offset, (n, vocab), &logits));
            let mut into = Data::new(offset, (n, vocab), &vec![G::default(); n * vocab]);
            let [mut a, mut b, mut c] = [(); 3].map(|_| Data::row(0, &vec![9f32; n]));
            device().cross_entropy(CrossEntropy {
                logits: evaluated.view_mut(),
                targets: targets.view(),
                losses: a.view_mut(),
                gradient: LogitGradient::None,
            });
            device().cross_entropy(CrossEntropy {
                logits: in_place.view_mut(),
                targets: targets.view(),
                losses: b.view_mut(),
                gradient: LogitGradient::InPlace(SCALE),
            });
            device().cross_entropy(CrossEntropy {
                logits: from.view_mut(),
                targets: targets.view(),
                losses: c.view_mut(),
                gradient: LogitGradient::Into(into.view_mut(), SCALE),
            });
            assert_eq!(from.read::<L>(), logits, "the logits are unchanged");
            let [a, b, c] = [a, b, c].map(|losses| losses.read_f64::<f32>());
            [a, b, c, in_place.read_f64::<L>(), into.read_f64::<G>()]
        });
    }
}

fn in_place(logits: &mut Data, targets: &[u32]) -> Vec<f32> {
    let mut losses = Data::row(0, &vec![9f32; targets.len()]);
    device().cross_entropy(CrossEntropy {
        logits: logits.view_mut(),
        targets: Data::row(0, targets).view(),
        losses: losses.view_mut(),
        gradient: LogitGradient::InPlace(1.0),
    });
    losses.read()
}

#[test]
fn nan_logits_give_nan_losses() {
    let mut values = vec![1f32; 300];
    values[171] = f32::NAN;
    let mut logits = Data::row(0, &values);
    assert!(in_place(&mut logits, &[3])[0].is_nan());
    assert!(logits.read::<f32>().iter().all(|x| x.is_nan()));
}

#[test]
fn masked_logits_have_probability_zero() {
    let masked = [f32::NEG_INFINITY, 0.0, 0.0, f32::NEG_INFINITY];
    let mut logits = Data::row(0, &masked);
    let losses = in_place(&mut logits, &[1]);
    assert_eq!(logits.read::<f32>(), [0.0, -0.5, 0.5, 0.0]);
    close("loss", 1e-6, &[2f64.ln()], &to_f64(&losses));
}
