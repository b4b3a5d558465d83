use crate::check::*;
use lockstep_kernels::Float;
use lockstep_kernels::IGNORED;
use lockstep_kernels::cpu::cross_entropy::{self as loss, Loss, SoftmaxStats, Targets};
use lockstep_kernels::cpu::{Cpu, elementwise, reduce};
use lockstep_kernels::reference::cross_entropy as reference;

crate::both_types!(equals_its_reference);

const HOW: [Loss; 2] = [Loss { scale: 1.0, z_loss: 0.0 }, Loss { scale: 0.125, z_loss: 0.01 }];

/// Logits spread wide, and targets of which every fifth is ignored.
fn rows(rows: usize, vocab: usize) -> (Vec<f32>, Vec<u32>) {
    let logits = numbers::<f32>(rows * vocab, 1).iter().map(|x| x * 5.0 + 2.0).collect();
    let mut targets = whole(rows, vocab, 2);
    targets.iter_mut().skip(1).step_by(5).for_each(|target| *target = IGNORED);
    (logits, targets)
}

fn equals_its_reference<E: Float>() {
    for ((n, vocab), how) in SHAPES.into_iter().flat_map(|shape| HOW.map(|how| (shape, how))) {
        let (logits, targets) = rows(n, vocab);
        let right = [
            reference::losses(&to_f64(&logits), &targets, how.z_loss as f64),
            reference::backward(&to_f64(&logits), &targets, how.scale as f64, how.z_loss as f64),
        ];
        everywhere(&format!("loss ({n}, {vocab})"), tolerance::<E>(3e-6), right, |cpu| {
            let (mut losses, mut d, mut dlogits) =
                (vec![9.0; n], logits.clone(), vec![E::default(); n * vocab]);
            loss::in_place(cpu, &mut d, &targets, how, &mut losses);
            let mut losses2 = vec![9.0; n];
            let all = Targets { ids: &targets, first: 0, how };
            loss::into(cpu, &logits, all, &mut losses2, &mut dlogits);
            close("in place and elsewhere", tolerance::<E>(1e-6), &to_f64(&d), &to_f64(&dlogits));
            close("losses", 1e-6, &to_f64(&losses), &to_f64(&losses2));
            loss::losses(cpu, &logits, &targets, how, &mut losses2);
            close("losses alone", 1e-6, &to_f64(&losses), &to_f64(&losses2));
            [to_f64(&losses), to_f64(&dlogits)]
        });
    }
}

/// The columns `from..to` of every row.
fn share(x: &[f32], vocab: usize, from: usize, to: usize) -> Vec<f32> {
    x.chunks_exact(vocab).flat_map(|row| row[from..to].to_vec()).collect()
}

/// Three shares of the vocabulary, reduced by hand between the pieces, equal the whole.
#[test]
fn shares_of_the_vocabulary_equal_the_whole() {
    let (n, vocab, cuts) = (37, 501, [0, 100, 101, 501]);
    let (logits, targets) = rows(n, vocab);
    for (how, cpu) in HOW.into_iter().flat_map(|how| [1, 3].map(|threads| (how, Cpu::new(threads))))
    {
        let shares: Vec<_> =
            cuts.windows(2).map(|cut| (cut[0], share(&logits, vocab, cut[0], cut[1]))).collect();
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

        let right =
            reference::backward(&to_f64(&logits), &targets, how.scale as f64, how.z_loss as f64);
        let right: Vec<f32> = right.iter().map(|d| *d as f32).collect();
        for ((first, mut logits), cut) in shares.into_iter().zip(cuts.windows(2)) {
            let right = to_f64(&share(&right, vocab, cut[0], cut[1]));
            let mut elsewhere = logits.clone();
            let targets = Targets { ids: &targets, first, how };
            loss::finish_into(&cpu, &logits, &found, targets, &mut elsewhere);
            close("elsewhere", 2e-6, &right, &to_f64(&elsewhere));
            loss::finish_in_place(&cpu, &mut logits, &found, targets);
            close("in place", 2e-6, &right, &to_f64(&logits));
        }
    }
}

#[test]
fn the_references_backward_is_its_slope() {
    let (logits, targets) = rows(7, 9);
    let logits = to_f64(&logits);
    let right = slopes(&logits, |logits| {
        0.5 * reference::losses(logits, &targets, 0.1).iter().sum::<f64>()
    });
    close("dlogits", 1e-7, &right, &reference::backward(&logits, &targets, 0.5, 0.1));
}

#[test]
fn a_nan_among_the_logits_is_not_hidden() {
    let mut logits = vec![1.0f32; 300];
    logits[171] = f32::NAN;
    let mut losses = [0.0; 1];
    loss::in_place(&Cpu::new(1), &mut logits, &[3], HOW[0], &mut losses);
    assert!(losses[0].is_nan());
    assert_eq!(reduce::count_non_finite(&Cpu::new(1), &logits), 300);
}

#[test]
fn masked_logits_have_no_share() {
    let mut logits = [f32::NEG_INFINITY, 0.0, 0.0, f32::NEG_INFINITY];
    let mut losses = [0.0; 1];
    loss::in_place(&Cpu::new(1), &mut logits, &[1], HOW[0], &mut losses);
    assert_eq!((logits, losses), ([0.0, -0.5, 0.5, 0.0], [2f32.ln()]));
}

#[test]
#[should_panic(expected = "target 9 is out of range: the vocabulary has 9 tokens")]
fn a_target_beyond_the_vocabulary_is_named() {
    loss::in_place(&Cpu::new(1), &mut [0.0; 9], &[9], HOW[0], &mut [0.0]);
}
