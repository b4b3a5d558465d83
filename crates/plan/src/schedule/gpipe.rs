//! GPipe: all forward, then all backward. The simplest, and the only one whose memory grows with the number
//! of micro-batches: every rank holds all of them at once.

use super::action::{Act, Action};
use super::clock::Times;

/// Backward takes the micro-batches in the order of forward, as all schedules here do: gradients are then
/// summed in the same order whatever the schedule.
pub(super) fn actions(stage: usize, micros: usize) -> Vec<Action> {
    let all = |act| (0..micros).map(move |micro| Action::new(stage, act, micro));
    all(Act::Forward).chain(all(Act::Backward)).collect()
}

/// The last rank waits for P-1 forward passes, the first for P-1 backward passes, those between for some of
/// each: (P-1)(F+B+W).
pub(super) fn bubble(ranks: usize, times: &Times) -> f64 {
    (ranks - 1) as f64 * (times.forward + times.input + times.weights)
}
