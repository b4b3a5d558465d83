//! GPipe: all forward passes, then all backward passes. Every rank holds the activations of all micro-batches.

use super::action::{Act, Action};
use super::clock::Times;

/// Backward passes run in the order of the forward passes, as in all schedules here, so that gradients are summed in the
/// same order in every schedule.
pub(super) fn actions(stage: usize, micros: usize) -> Vec<Action> {
    let all = |act| (0..micros).map(move |micro| Action::new(stage, act, micro));
    all(Act::Forward).chain(all(Act::Backward)).collect()
}

/// The last rank waits for P-1 forward passes, the first for P-1 backward passes, those between for some of
/// each: (P-1)(F+B+W).
pub(super) fn bubble(ranks: usize, times: &Times) -> f64 {
    (ranks - 1) as f64 * (times.forward + times.input + times.weights)
}
