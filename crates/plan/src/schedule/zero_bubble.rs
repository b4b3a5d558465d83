//! ZB-H1 and ZB-H2, the handcrafted schedules of "Zero Bubble Pipeline Parallelism" (Qi et al. 2023). Other
//! ranks wait only for input gradients; weight gradients can be deferred to when the rank would idle.
//!
//! Both are 1F1B with a lag: rank r computes weight gradients some micro-batches after the input gradients, more for later
//! ranks. Later ranks finish their input gradients earlier, and their deferred weight gradients fill the drain phase.

use super::action::{Act, Action};
use super::clock::Times;

/// Warm-up of 1F1B and a lag of r. Every rank holds min(P, micro-batches) activations.
pub(super) fn h1(rank: usize, ranks: usize, micros: usize) -> Vec<Action> {
    lagging(rank, micros, ranks - rank, rank)
}

/// Twice the warm-up, so that no rank waits for the first input gradient, and twice the lag. Every rank holds
/// min(2P-1, micro-batches) activations. Ranks end as far apart as they start, so the step has no bubble only if ranks do
/// not wait for each other before the optimizer.
pub(super) fn h2(rank: usize, ranks: usize, micros: usize) -> Vec<Action> {
    lagging(rank, micros, 2 * (ranks - rank) - 1, 2 * rank)
}

fn lagging(stage: usize, micros: usize, warmup: usize, lag: usize) -> Vec<Action> {
    let warmup = warmup.min(micros);
    let forward = |micro| Action::new(stage, Act::Forward, micro);
    let weights = |micro| Action::new(stage, Act::Weights, micro);
    let mut list: Vec<Action> = (0..warmup).map(forward).collect();
    for micro in 0..micros {
        list.push(Action::new(stage, Act::Input, micro));
        list.extend((micro >= lag).then(|| weights(micro - lag)));
        list.extend((warmup + micro < micros).then(|| forward(warmup + micro)));
    }
    list.extend((micros.saturating_sub(lag)..micros).map(weights));
    list
}

/// (P-1)(F+B-W) as in the paper, which assumes that W is the shortest. A W longer than F fills only the gap of F, and
/// (P-1)B remains. Valid from P micro-batches.
pub(super) fn h1_bubble(ranks: usize, micros: usize, times: &Times) -> Option<f64> {
    let gap = times.input + (times.forward - times.weights).max(0.0);
    (micros >= ranks).then(|| (ranks - 1) as f64 * gap)
}

/// (P-1)(F+B-2W) as in the paper if that is the largest term; with a long W it is (P-1)(B-F), or nothing. Valid from 2P-1
/// micro-batches.
pub(super) fn h2_bubble(ranks: usize, micros: usize, times: &Times) -> Option<f64> {
    let Times { forward, input, weights, .. } = *times;
    let gap = (forward + input - 2.0 * weights).max(input - forward).max(0.0);
    (micros >= 2 * ranks - 1).then(|| (ranks - 1) as f64 * gap)
}
