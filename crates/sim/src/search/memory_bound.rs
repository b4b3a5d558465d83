//! Lower bounds of the memory of a candidate and of all candidates of a group.

use crate::case::Case;
use crate::memory::{Layers, MemoryEstimate, by_formula};

/// Lower bounds of the memory of the fullest rank, and of the largest excess over the available memory. Looks at three
/// pipeline ranks: the first, which has the most micro-batches in flight, the second, which may have one layer more, and
/// the last, which has the loss. The estimate of all ranks decides the rest.
pub(super) fn needed(case: &Case, layers: &Layers, available: &[f64]) -> (f64, f64) {
    let mut needed = (0.0, f64::NEG_INFINITY);
    for pipe in checked_ranks(case) {
        let total = by_formula(case, layers, pipe).total();
        needed = (f64::max(needed.0, total), f64::max(needed.1, total - available[pipe]));
    }
    needed
}

/// Whether a schedule does not fit at any ZeRO level. `case` has ZeRO-3 on all replicas.
pub(super) fn infeasible(case: &Case, layers: &Layers, available: &[f64]) -> bool {
    let least = |pipe: usize| without_gathered(by_formula(case, layers, pipe), case);
    checked_ranks(case).into_iter().any(|pipe| least(pipe) > available[pipe])
}

/// Lower bound of the memory of the first and last pipeline rank over all ZeRO levels and schedules: fully sharded states,
/// nothing gathered, and the micro-batches in flight of 1F1B. `case` has ZeRO-3 on all replicas.
pub(super) fn least(case: &Case, layers: &Layers) -> f64 {
    let least = |pipe: usize| without_gathered(by_formula(case, layers, pipe), case);
    [0, case.pipe() - 1].map(least).into_iter().fold(0.0, f64::max)
}

fn checked_ranks(case: &Case) -> [usize; 3] {
    let last = case.pipe() - 1;
    [0, last.min(1), last]
}

fn without_gathered(memory: MemoryEstimate, case: &Case) -> f64 {
    let less = MemoryEstimate { gathered: 0.0, buffers: 0.0, slack: 0.0, ..memory };
    less.allocated() * (1.0 + case.software().slack) + less.reserve
}
