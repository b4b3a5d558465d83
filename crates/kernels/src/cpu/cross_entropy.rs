//! The loss of a row of logits against its target, and the logits' gradient; whole, or in the pieces that a
//! vocabulary spread over ranks needs. Knows nothing of ranks: the caller reduces between the pieces.

use super::Cpu;
use super::math::exp;
use super::partition::{by_rows, grain_rows, parallel_for};
use super::simd::{LANES, lane_sums, multiversion};
use crate::{Float, IGNORED};

/// How a loss becomes a gradient.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    /// What every gradient is multiplied by: 1 / tokens for a mean.
    pub scale: f32,
    /// Weight of the z-loss, `z * ln²(Σ e^logit)`, which keeps logits from drifting (PaLM); 0 for none.
    pub z_loss: f32,
}

/// What the ranks of a vocabulary have found together, one per row.
pub struct Found<'a> {
    pub max: &'a [f32],    // (rows): the largest logit
    pub sum: &'a [f32],    // (rows): Σ e^(logit - max)
    pub target: &'a [f32], // (rows): the target's logit
}

/// Replaces `logits` (rows, vocab) by their gradient and writes each row's loss.
pub fn in_place(cpu: &Cpu, logits: &mut [f32], targets: &[u32], how: Loss, losses: &mut [f32]) {
    let vocab = width(logits.len(), targets.len(), losses.len());
    check(targets, vocab);
    parallel_for(
        &cpu.team,
        targets.len(),
        grain_rows(vocab),
        (by_rows(logits, vocab), by_rows(losses, 1)),
        |rows, (logits, losses)| {
            for ((logits, &target), loss) in
                logits.chunks_exact_mut(vocab).zip(&targets[rows]).zip(losses)
            {
                *loss = row_in_place(cpu.level, logits, target, how);
            }
        },
    );
}

/// The same with the gradient elsewhere, rounded to its type.
pub fn into<E: Float>(
    cpu: &Cpu,
    logits: &[f32],
    targets: &[u32],
    how: Loss,
    losses: &mut [f32],
    dlogits: &mut [E],
) {
    let vocab = width(logits.len(), targets.len(), losses.len());
    check(targets, vocab);
    assert_eq!(dlogits.len(), logits.len());
    parallel_for(
        &cpu.team,
        targets.len(),
        grain_rows(vocab),
        (by_rows(dlogits, vocab), by_rows(losses, 1)),
        |rows, (dlogits, losses)| {
            let logits = logits[rows.start * vocab..].chunks_exact(vocab);
            let rows =
                logits.zip(&targets[rows]).zip(losses).zip(dlogits.chunks_exact_mut(vocab.max(1)));
            for (((logits, &target), loss), dlogits) in rows {
                *loss = row_into(cpu.level, logits, target, how, dlogits);
            }
        },
    );
}

/// Only the losses: evaluation.
pub fn losses(cpu: &Cpu, logits: &[f32], targets: &[u32], how: Loss, losses: &mut [f32]) {
    let vocab = width(logits.len(), targets.len(), losses.len());
    check(targets, vocab);
    parallel_for(
        &cpu.team,
        targets.len(),
        grain_rows(vocab),
        by_rows(losses, 1),
        |rows, losses| {
            let logits = logits[rows.start * vocab..].chunks_exact(vocab.max(1));
            for ((logits, &target), loss) in logits.zip(&targets[rows]).zip(losses) {
                *loss = if target == IGNORED {
                    0.0
                } else {
                    let most = largest(cpu.level, logits);
                    value(how, most, exp_sum(cpu.level, logits, most), logits[target as usize])
                };
            }
        },
    );
}

/// Each row's largest logit of this share of the vocabulary.
pub fn row_max(cpu: &Cpu, logits: &[f32], max: &mut [f32]) {
    let share = width(logits.len(), max.len(), max.len());
    parallel_for(&cpu.team, max.len(), grain_rows(share), by_rows(max, 1), |rows, max| {
        for (row, max) in rows.zip(max) {
            *max = largest(cpu.level, &logits[row * share..][..share]);
        }
    });
}

/// Each row's `Σ e^(logit - max)` over this share, given the maximum over all shares.
pub fn row_sum(cpu: &Cpu, logits: &[f32], max: &[f32], sum: &mut [f32]) {
    let share = width(logits.len(), sum.len(), max.len());
    parallel_for(&cpu.team, sum.len(), grain_rows(share), by_rows(sum, 1), |rows, sum| {
        for (row, sum) in rows.zip(sum) {
            *sum = exp_sum(cpu.level, &logits[row * share..][..share], max[row]);
        }
    });
}

/// Each target's logit where this share has it, else 0, so that the shares' answers add up. The share's
/// first logit is of token `first`.
pub fn target_logit(logits: &[f32], targets: &[u32], first: usize, out: &mut [f32]) {
    let share = width(logits.len(), targets.len(), out.len());
    for (row, (&target, out)) in targets.iter().zip(out).enumerate() {
        *out = column(target, first, share).map_or(0.0, |column| logits[row * share + column]);
    }
}

/// The losses, once all shares are in: the same on every rank.
pub fn finish_losses(found: &Found, targets: &[u32], how: Loss, losses: &mut [f32]) {
    for (row, (&target, loss)) in targets.iter().zip(losses).enumerate() {
        let all = value(how, found.max[row], found.sum[row], found.target[row]);
        *loss = if target == IGNORED { 0.0 } else { all };
    }
}

/// This share's gradient, given what all shares have found. `logits` are replaced by it.
pub fn finish_in_place(
    cpu: &Cpu,
    logits: &mut [f32],
    found: &Found,
    targets: &[u32],
    first: usize,
    how: Loss,
) {
    let share = width(logits.len(), targets.len(), found.sum.len());
    parallel_for(
        &cpu.team,
        targets.len(),
        grain_rows(share),
        by_rows(logits, share),
        |rows, logits| {
            for (row, logits) in rows.zip(logits.chunks_exact_mut(share.max(1))) {
                let pull = Pull::new(how, found.max[row], found.sum[row], targets[row]);
                softmax_in_place(cpu.level, logits, found.max[row], pull.factor);
                if let Some(column) = column(targets[row], first, share) {
                    logits[column] -= pull.own;
                }
            }
        },
    );
}

/// The same with the gradient elsewhere, rounded to its type.
pub fn finish_into<E: Float>(
    cpu: &Cpu,
    logits: &[f32],
    found: &Found,
    targets: &[u32],
    first: usize,
    how: Loss,
    dlogits: &mut [E],
) {
    let share = width(logits.len(), targets.len(), found.sum.len());
    assert_eq!(dlogits.len(), logits.len());
    parallel_for(
        &cpu.team,
        targets.len(),
        grain_rows(share),
        by_rows(dlogits, share),
        |rows, dlogits| {
            for (row, dlogits) in rows.zip(dlogits.chunks_exact_mut(share.max(1))) {
                let logits = &logits[row * share..][..share];
                let pull = Pull::new(how, found.max[row], found.sum[row], targets[row]);
                softmax_into(cpu.level, logits, found.max[row], pull.factor, dlogits);
                if let Some(column) = column(targets[row], first, share) {
                    dlogits[column] = E::round_from(
                        exp_of(logits[column] - found.max[row]) * pull.factor - pull.own,
                    );
                }
            }
        },
    );
}

/// The vocabulary (or this rank's share of it): the width of a row.
fn width(logits: usize, rows: usize, others: usize) -> usize {
    assert_eq!(rows, others, "one target, one loss, one of everything per row");
    assert!(logits.is_multiple_of(rows.max(1)), "{logits} logits are no {rows} rows");
    logits.checked_div(rows).unwrap_or(0)
}

fn check(targets: &[u32], vocab: usize) {
    if let Some(target) =
        targets.iter().find(|&&target| target != IGNORED && target as usize >= vocab)
    {
        panic!("target {target} is beyond the vocabulary of {vocab}");
    }
}

/// Where `target` lies in a share of the vocabulary.
fn column(target: u32, first: usize, share: usize) -> Option<usize> {
    if target == IGNORED {
        None
    } else {
        (target as usize).checked_sub(first).filter(|column| *column < share)
    }
}

fn value(how: Loss, max: f32, sum: f32, target: f32) -> f32 {
    let log_sum = sum.ln() + max;
    // Near the maximum first: the two large numbers cancel before the small one is added.
    (max - target) + sum.ln() + how.z_loss * log_sum * log_sum
}

/// A row's gradient is `e^(logit - max) * factor`, less `own` at the target.
#[derive(Clone, Copy)]
struct Pull {
    factor: f32,
    own: f32,
}

impl Pull {
    fn new(how: Loss, max: f32, sum: f32, target: u32) -> Pull {
        if target == IGNORED {
            return Pull { factor: 0.0, own: 0.0 };
        }
        let log_sum = sum.ln() + max;
        Pull { factor: how.scale * (1.0 + 2.0 * how.z_loss * log_sum) / sum, own: how.scale }
    }
}

/// Writes a row's gradient over its logits; the loss.
fn row_in_place(level: super::Level, logits: &mut [f32], target: u32, how: Loss) -> f32 {
    if target == IGNORED {
        logits.fill(0.0);
        return 0.0;
    }
    let own = logits[target as usize];
    let most = largest(level, logits);
    let sum = exps_in_place(level, logits, most);
    let pull = Pull::new(how, most, sum, target);
    scale_part(level, logits, pull.factor);
    logits[target as usize] -= pull.own;
    value(how, most, sum, own)
}

/// Writes a row's gradient; the loss.
fn row_into<E: Float>(
    level: super::Level,
    logits: &[f32],
    target: u32,
    how: Loss,
    out: &mut [E],
) -> f32 {
    if target == IGNORED {
        out.fill(E::default());
        return 0.0;
    }
    let own = logits[target as usize];
    let most = largest(level, logits);
    let sum = exp_sum(level, logits, most);
    let pull = Pull::new(how, most, sum, target);
    softmax_into(level, logits, most, pull.factor, out);
    // Rounded once, after the difference.
    out[target as usize] = E::round_from(exp_of(own - most) * pull.factor - pull.own);
    value(how, most, sum, own)
}

/// One exponential, as the loops compute it.
fn exp_of(x: f32) -> f32 {
    exp::<super::simd::Portable>(x)
}

multiversion! {
    fn largest<I>(x: &[f32]) -> f32 {
        let (whole, rest) = x.as_chunks::<LANES>();
        let mut most = [f32::NEG_INFINITY; LANES];
        for x in whole {
            for l in 0..LANES {
                most[l] = if x[l] > most[l] { x[l] } else { most[l] };
            }
        }
        let all = most.iter().chain(rest);
        let mut largest = f32::NEG_INFINITY;
        for &x in all {
            largest = if x > largest { x } else { largest };
        }
        largest
    }

    fn exp_sum<I>(x: &[f32], max: f32) -> f32 {
        lane_sums!(I, (x in x) sum = sum + exp::<I>(x - max))
    }

    /// Leaves `e^(x - max)` and returns their sum.
    fn exps_in_place<I>(x: &mut [f32], max: f32) -> f32 {
        let mut sums = [0f32; LANES];
        let (whole, rest) = x.as_chunks_mut::<LANES>();
        for x in whole {
            for l in 0..LANES {
                x[l] = exp::<I>(x[l] - max);
                sums[l] += x[l];
            }
        }
        let mut sum = I::sum_lanes(&sums);
        for x in rest {
            *x = exp::<I>(*x - max);
            sum += *x;
        }
        sum
    }

    fn scale_part<I>(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }

    fn softmax_in_place<I>(x: &mut [f32], max: f32, factor: f32) {
        for x in x {
            *x = exp::<I>(*x - max) * factor;
        }
    }

    fn softmax_into<I, E: Float>(x: &[f32], max: f32, factor: f32, out: &mut [E]) {
        let n = out.len();
        let x = &x[..n];
        for i in 0..n {
            out[i] = E::round_from(exp::<I>(x[i] - max) * factor);
        }
    }
}
