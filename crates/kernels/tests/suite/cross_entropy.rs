use crate::check::*;
use lockstep_kernels::Float;
use lockstep_kernels::IGNORED;
use lockstep_kernels::cpu::cross_entropy::{self as loss, Loss, SoftmaxStats, Targets};
use lockstep_kernels::cpu::{Cpu, elementwise, reduce};
use lockstep_kernels::reference::cross_entropy as reference;

crate::both_types!(matches_the_reference);

const HOW: [Loss; 2] = [Loss { scale: 1.0, z_loss: 0.0 }, Loss { scale: 0.125, z_loss: 0.01 }];

/// Logits of a wide range, and targets of which every fifth is ignored.
fn rows(rows: usize, vocab: usize) -> (Vec<f32>, Vec<u32>) {
    let logits = numbers::<f32>(rows * vocab, 1).iter().map(|x| x * 5.0 + 2.0).collect();
    let mut targets = integers(rows, vocab, 2);
    targets.iter_mut().skip(1).step_by(5).for_each(|target| *target = IGNORED);
    (logits, targets)
}

fn matches_the_reference<E: Float>() {
    for ((n, vocab), how) in SHAPES.into_iter().flat_map(|shape| HOW.map(|how| (shape, how))) {
        let (logits, targets) = rows(n, vocab);
        let expected = [
            reference::losses(&to_f64(&logits), &targets, how.z_loss as f64),
            reference::backward(&to_f64(&logits), &targets, how.scale as f64, how.z_loss as f64),
        ];
        everywhere(&format!("loss ({n}, {vocab})"), tolerance::<E>(3e-6), expected, |cpu| {
            let (mut losses, mut d, mut dlogits) =
                (vec![9.0; n], logits.clone(), vec![E::default(); n * vocab]);
            loss::in_place(cpu, &mut d, &targets, how, &mut losses);
            let mut losses2 = vec![9.0; n];
            let all = Targets { ids: &targets, first: 0, how };
            loss::into(cpu, &logits, all, &mut losses2, &mut dlogits);
            close(
                "in place and into another tensor",
                tolerance::<E>(1e-6),
                &to_f64(&d),
                &to_f64(&dlogits),
            );
            close("losses", 1e-6, &to_f64(&losses), &to_f64(&losses2));
            loss::losses(cpu, &logits, &targets, how, &mut losses2);
            close("losses without gradient", 1e-6, &to_f64(&losses), &to_f64(&losses2));
            [to_f64(&losses), to_f64(&dlogits)]
        });
    }
}

/// Columns `from..to` of every row.
fn shard(x: &[f32], vocab: usize, from: usize, to: usize) -> Vec<f32> {
    x.chunks_exact(vocab).flat_map(|row| row[from..to].to_vec()).collect()
}

/// Three shards of the vocabulary with manual reductions match the whole vocabulary.
#[test]
fn vocabulary_shards_match_the_whole() {
    let (n, vocab, cuts) = (37, 501, [0, 100, 101, 501]);
    let (logits, targets) = rows(n, vocab);
    for (how, cpu) in HOW.into_iter().flat_map(|how| [1, 3].map(|threads| (how, Cpu::new(threads))))
    {
        let shares: Vec<_> =
            cuts.windows(2).map(|cut| (cut[0], shard(&logits, vocab, cut[0], cut[1]))).collect();
        let (mut max, mut sum, mut target) =
            (vec![f32::NEG_INFINITY; n], vec![0.0; n], vec![0.0; n]);
        let mut one = vec![0.0; n];
        for (_, share) in &shares {
            loss::row_max(&cpu, share, &mut one);
            max.iter_mut().zip(&one).for_each(|(max, one)| *max = max.max(*one));
        }
        for (first, share) in &shares {
            loss::row_sum(&cpu, share, &max, &mut one);
            elementwise::add(&cpu, &mut sum, &one);
            loss::target_logit(share, &targets, *first, &mut one);
            elementwise::add(&cpu, &mut target, &one);
        }
        let found = SoftmaxStats { max: &max, sum: &sum, target: &target };
        let mut losses = vec![0.0; n];
        loss::finish_losses(&found, &targets, how, &mut losses);
        close(
            "losses",
            2e-6,
            &reference::losses(&to_f64(&logits), &targets, how.z_loss as f64),
            &to_f64(&losses),
        );

        let expected =
            reference::backward(&to_f64(&logits), &targets, how.scale as f64, how.z_loss as f64);
        let expected: Vec<f32> = expected.iter().map(|d| *d as f32).collect();
        for ((first, mut logits), cut) in shares.into_iter().zip(cuts.windows(2)) {
            let expected = to_f64(&shard(&expected, vocab, cut[0], cut[1]));
            let mut elsewhere = logits.clone();
            let targets = Targets { ids: &targets, first, how };
            loss::finish_into(&cpu, &logits, &found, targets, &mut elsewhere);
            close("into another tensor", 2e-6, &expected, &to_f64(&elsewhere));
            loss::finish_in_place(&cpu, &mut logits, &found, targets);
            close("in place", 2e-6, &expected, &to_f64(&logits));
        }
    }
}

#[test]
fn reference_gradient_matches_finite_differences() {
    let (logits, targets) = rows(7, 9);
    let logits = to_f64(&logits);
    let expected = finite_differences(&logits, |logits| {
        0.5 * reference::losses(logits, &targets, 0.1).iter().sum::<f64>()
    });
    close("dlogits", 1e-7, &expected, &reference::backward(&logits, &targets, 0.5, 0.1));
}

#[test]
fn nan_logits_give_nan_losses() {
    let mut logits = vec![1.0f32; 300];
    logits[171] = f32::NAN;
    let mut losses = [0.0; 1];
    loss::in_place(&Cpu::new(1), &mut logits, &[3], HOW[0], &mut losses);
    assert!(losses[0].is_nan());
    assert_eq!(reduce::count_non_finite(&Cpu::new(1), &logits), 300);
}

#[test]
fn masked_logits_have_probability_zero() {
    let mut logits = [f32::NEG_INFINITY, 0.0, 0.0, f32::NEG_INFINITY];
    let mut losses = [0.0; 1];
    loss::in_place(&Cpu::new(1), &mut logits, &[1], HOW[0], &mut losses);
    assert_eq!((logits, losses), ([0.0, -0.5, 0.5, 0.0], [2f32.ln()]));
}

#[test]
#[should_panic(expected = "target 9 is out of range: the vocabulary has 9 tokens")]
fn a_target_outside_the_vocabulary_panics() {
    loss::in_place(&Cpu::new(1), &mut [0.0; 9], &[9], HOW[0], &mut [0.0]);
}
