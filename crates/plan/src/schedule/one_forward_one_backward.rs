//! 1F1B: backward passes run as early as possible and free their activations. Same bubble as GPipe, but rank r of P holds
//! only min(P-r, micro-batches) activations.

use super::action::{Act, Action};
use super::clock::Times;

/// Warm-up forward passes until the first gradient can arrive, then one backward and one forward in turn.
pub(super) fn actions(rank: usize, ranks: usize, micros: usize) -> Vec<Action> {
    let warmup = (ranks - rank).min(micros);
    let forward = |micro| Action::new(rank, Act::Forward, micro);
    let mut list: Vec<Action> = (0..warmup).map(forward).collect();
    for micro in 0..micros {
        list.push(Action::new(rank, Act::Backward, micro));
        list.extend((warmup + micro < micros).then(|| forward(warmup + micro)));
    }
    list
}

/// As in GPipe: (P-1)(F+B+W).
pub(super) fn bubble(ranks: usize, times: &Times) -> f64 {
    (ranks - 1) as f64 * (times.forward + times.input + times.weights)
}
