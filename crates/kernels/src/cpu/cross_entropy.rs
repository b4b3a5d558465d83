//! Cross-entropy loss and its gradient with respect to the logits, for a whole vocabulary or for shards of it. Knows
//! nothing about ranks: the caller reduces the statistics of the shards.

use super::Cpu;
use super::math::exp;
use super::partition::{by_rows, grain_rows, parallel_for};
use super::simd::{LANES, lane_sums, multiversion};
use crate::{Float, IGNORED};

/// Options of the loss.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    /// Factor of the gradient: 1 / tokens for a mean.
    pub scale: f32,
    /// Weight of the z-loss, `z * ln²(Σ e^logit)`, which keeps logits from drifting (PaLM); 0 for none.
    pub z_loss: f32,
}

/// Targets of the rows of logits.
#[derive(Clone, Copy)]
pub struct Targets<'a> {
    pub ids: &'a [u32], // (rows)
    /// Token id of the first logit of a row; 0 for a whole vocabulary.
    pub first: usize,
    pub how: Loss,
}

/// Softmax statistics of each row over the whole vocabulary.
pub struct SoftmaxStats<'a> {
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

/// Writes the gradient to `dlogits`, rounded to its type, and the loss of each row.
pub fn into<E: Float>(
    cpu: &Cpu,
    logits: &[f32],
    targets: Targets<'_>,
    losses: &mut [f32],
    dlogits: &mut [E],
) {
    let Targets { ids: targets, how, .. } = targets;
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

/// Losses only, for evaluation.
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
                    let max = largest(cpu.level, logits);
                    value(how, max, exp_sum(cpu.level, logits, max), logits[target as usize])
                };
            }
        },
    );
}

/// The largest logit of each row of this shard.
pub fn row_max(cpu: &Cpu, logits: &[f32], max: &mut [f32]) {
    let shard = width(logits.len(), max.len(), max.len());
    parallel_for(&cpu.team, max.len(), grain_rows(shard), by_rows(max, 1), |rows, max| {
        for (row, max) in rows.zip(max) {
            *max = largest(cpu.level, &logits[row * shard..][..shard]);
        }
    });
}

/// `Σ e^(logit - max)` of each row over this shard, given the maximum over all shards.
pub fn row_sum(cpu: &Cpu, logits: &[f32], max: &[f32], sum: &mut [f32]) {
    let shard = width(logits.len(), sum.len(), max.len());
    parallel_for(&cpu.team, sum.len(), grain_rows(shard), by_rows(sum, 1), |rows, sum| {
        for (row, sum) in rows.zip(sum) {
            *sum = exp_sum(cpu.level, &logits[row * shard..][..shard], max[row]);
        }
    });
}

/// The logit of each target, or 0 if it is in another shard, so that a sum over shards gives the result. `first` is the
/// token id of the shard's first logit.
pub fn target_logit(logits: &[f32], targets: &[u32], first: usize, out: &mut [f32]) {
    let shard = width(logits.len(), targets.len(), out.len());
    for (row, (&target, out)) in targets.iter().zip(out).enumerate() {
        *out = column(target, first, shard).map_or(0.0, |column| logits[row * shard + column]);
    }
}

/// Losses from the statistics of all shards.
pub fn finish_losses(stats: &SoftmaxStats, targets: &[u32], how: Loss, losses: &mut [f32]) {
    for (row, (&target, loss)) in targets.iter().zip(losses).enumerate() {
        let all = value(how, stats.max[row], stats.sum[row], stats.target[row]);
        *loss = if target == IGNORED { 0.0 } else { all };
    }
}

/// Replaces the logits of this shard by their gradient, given the statistics of all shards.
pub fn finish_in_place(cpu: &Cpu, logits: &mut [f32], stats: &SoftmaxStats, targets: Targets<'_>) {
    let Targets { ids: targets, first, how } = targets;
    let shard = width(logits.len(), targets.len(), stats.sum.len());
    parallel_for(
        &cpu.team,
        targets.len(),
        grain_rows(shard),
        by_rows(logits, shard),
        |rows, logits| {
            for (row, logits) in rows.zip(logits.chunks_exact_mut(shard.max(1))) {
                let gradient = RowGradient::new(how, stats.max[row], stats.sum[row], targets[row]);
                softmax_in_place(cpu.level, logits, stats.max[row], gradient.factor);
                if let Some(column) = column(targets[row], first, shard) {
                    logits[column] -= gradient.target;
                }
            }
        },
    );
}

/// Writes the gradient of this shard to `dlogits`, rounded to its type.
pub fn finish_into<E: Float>(
    cpu: &Cpu,
    logits: &[f32],
    stats: &SoftmaxStats,
    targets: Targets<'_>,
    dlogits: &mut [E],
) {
    let Targets { ids: targets, first, how } = targets;
    let shard = width(logits.len(), targets.len(), stats.sum.len());
    assert_eq!(dlogits.len(), logits.len());
    parallel_for(
        &cpu.team,
        targets.len(),
        grain_rows(shard),
        by_rows(dlogits, shard),
        |rows, dlogits| {
            for (row, dlogits) in rows.zip(dlogits.chunks_exact_mut(shard.max(1))) {
                let logits = &logits[row * shard..][..shard];
                let gradient = RowGradient::new(how, stats.max[row], stats.sum[row], targets[row]);
                softmax_into(cpu.level, logits, stats.max[row], gradient.factor, dlogits);
                if let Some(column) = column(targets[row], first, shard) {
                    dlogits[column] = E::round_from(
                        exp_of(logits[column] - stats.max[row]) * gradient.factor - gradient.target,
                    );
                }
            }
        },
    );
}

/// Checks the lengths and returns the number of logits per row.
fn width(logits: usize, rows: usize, others: usize) -> usize {
    assert_eq!(rows, others, "targets, losses and statistics must have one element per row");
    assert!(
        logits.is_multiple_of(rows.max(1)),
        "{logits} logits are not a multiple of {rows} rows"
    );
    logits.checked_div(rows).unwrap_or(0)
}

fn check(targets: &[u32], vocab: usize) {
    if let Some(target) =
        targets.iter().find(|&&target| target != IGNORED && target as usize >= vocab)
    {
        panic!("target {target} is out of range: the vocabulary has {vocab} tokens");
    }
}

/// Column of `target` in a shard of the vocabulary.
fn column(target: u32, first: usize, shard: usize) -> Option<usize> {
    if target == IGNORED {
        None
    } else {
        (target as usize).checked_sub(first).filter(|column| *column < shard)
    }
}

fn value(how: Loss, max: f32, sum: f32, target: f32) -> f32 {
    let log_sum = sum.ln() + max;
    // The two large numbers cancel before the small one is added.
    (max - target) + sum.ln() + how.z_loss * log_sum * log_sum
}

/// The gradient of a row is `e^(logit - max) * factor`, minus `target` at the target.
#[derive(Clone, Copy)]
struct RowGradient {
    factor: f32,
    target: f32,
}

impl RowGradient {
    fn new(how: Loss, max: f32, sum: f32, target: u32) -> RowGradient {
        if target == IGNORED {
            return RowGradient { factor: 0.0, target: 0.0 };
        }
        let log_sum = sum.ln() + max;
        RowGradient {
            factor: how.scale * (1.0 + 2.0 * how.z_loss * log_sum) / sum,
            target: how.scale,
        }
    }
}

/// Replaces the logits of a row by their gradient and returns the loss.
fn row_in_place(level: super::Level, logits: &mut [f32], target: u32, how: Loss) -> f32 {
    if target == IGNORED {
        logits.fill(0.0);
        return 0.0;
    }
    let target_logit = logits[target as usize];
    let max = largest(level, logits);
    let sum = exps_in_place(level, logits, max);
    let gradient = RowGradient::new(how, max, sum, target);
    scale_part(level, logits, gradient.factor);
    logits[target as usize] -= gradient.target;
    value(how, max, sum, target_logit)
}

/// Writes the gradient of a row and returns the loss.
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
    let target_logit = logits[target as usize];
    let max = largest(level, logits);
    let sum = exp_sum(level, logits, max);
    let gradient = RowGradient::new(how, max, sum, target);
    softmax_into(level, logits, max, gradient.factor, out);
    // Rounded once, after the subtraction.
    out[target as usize] =
        E::round_from(exp_of(target_logit - max) * gradient.factor - gradient.target);
    value(how, max, sum, target_logit)
}

/// One exponential, as computed in the loops.
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

    /// Replaces x by `e^(x - max)` and returns the sum.
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
