//! 1F1B: a rank that can do a backward pass does it, and frees its activations. The bubble of GPipe, in
//! memory that depends on the number of ranks and no longer on that of micro-batches: rank r of P holds
//! min(P-r, micro-batches).

use super::action::{Act, Action};
use super::clock::Times;

/// Warm up until the first micro-batch can be back, then take turns.
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

/// Filling and draining take as long as GPipe's: (P-1)(F+B+W).
pub(super) fn bubble(ranks: usize, times: &Times) -> f64 {
    (ranks - 1) as f64 * (times.forward + times.input + times.weights)
}
