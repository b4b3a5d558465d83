//! ZB-H1 and ZB-H2, the handcrafted schedules of "Zero Bubble Pipeline Parallelism" (Qi et al. 2023). Only the
//! gradient of the input is waited for by another rank; that of the weights can be computed at any later time,
//! and is put where the rank would idle.
//!
//! Both are 1F1B with a lag: rank r does the weights of a micro-batch some micro-batches after its input
//! gradient, the more the later the rank. Later ranks are done with their inputs earlier, and what they
//! have saved up fills the time in which the earlier ranks drain.

use super::action::{Act, Action};
use super::clock::Times;

/// Warm-up of 1F1B, a lag of r: what rank r holds less for its inputs than rank 0, it holds for its weights.
/// Every rank holds min(P, micro-batches).
pub(super) fn h1(rank: usize, ranks: usize, micros: usize) -> Vec<Action> {
    lagging(rank, micros, ranks - rank, rank)
}

/// Twice the warm-up, so that the first input gradient finds no rank waiting, and twice the lag. Every rank
/// holds min(2P-1, micro-batches). Ranks end as much apart as they began, so the step is without gaps only
/// if no rank waits for the others before its optimizer.
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

/// (P-1)(F+B-W) as in the paper, which takes W for the shortest of the three. A W longer than F fills no
/// more than the gap of F, and (P-1)B remain. From P micro-batches on.
pub(super) fn h1_bubble(ranks: usize, micros: usize, times: &Times) -> Option<f64> {
    let gap = times.input + (times.forward - times.weights).max(0.0);
    (micros >= ranks).then(|| (ranks - 1) as f64 * gap)
}

/// (P-1)(F+B-2W) as in the paper, while that is the largest of what can remain: with a long W, it is the
/// (P-1)(B-F) by which gradients return slower than activations went, or nothing. From 2P-1 micro-batches on.
pub(super) fn h2_bubble(ranks: usize, micros: usize, times: &Times) -> Option<f64> {
    let Times { forward, input, weights, .. } = *times;
    let gap = (forward + input - 2.0 * weights).max(input - forward).max(0.0);
    (micros >= 2 * ranks - 1).then(|| (ranks - 1) as f64 * gap)
}
