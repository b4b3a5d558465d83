//! Memory for the search: what a candidate, and what all candidates of a group, need at least.

use crate::case::Case;
use crate::memory::{Layers, MemoryEstimate, by_formula};

/// Bytes of the fullest rank at least, and by how many some rank has too few at least: the first, which has the most
/// passes in flight, the second, which may have a layer more, and the last, which has the loss. What they let pass, the
/// estimate of all ranks decides.
pub(super) fn needs(case: &Case, layers: &Layers, available: &[f64]) -> (f64, f64) {
    let mut needs = (0.0, f64::NEG_INFINITY);
    for pipe in looked_at(case) {
        let total = by_formula(case, layers, pipe).total();
        needs = (f64::max(needs.0, total), f64::max(needs.1, total - available[pipe]));
    }
    needs
}

/// Whether a schedule needs too much whatever ZeRO's stage. `case` has ZeRO-3 on all replicas.
pub(super) fn infeasible(case: &Case, layers: &Layers, available: &[f64]) -> bool {
    let least = |pipe: usize| without_gathered(by_formula(case, layers, pipe), case);
    looked_at(case).into_iter().any(|pipe| least(pipe) > available[pipe])
}

/// Bytes that the first or the last rank of the pipeline needs at least, whatever ZeRO's stage and the schedule: states
/// cut as far as can be, nothing gathered, and as many passes in flight as 1F1B has. `case` has ZeRO-3 on all replicas.
pub(super) fn needs_at_least(case: &Case, layers: &Layers) -> f64 {
    let least = |pipe: usize| without_gathered(by_formula(case, layers, pipe), case);
    [0, case.pipe() - 1].map(least).into_iter().fold(0.0, f64::max)
}

fn looked_at(case: &Case) -> [usize; 3] {
    let last = case.pipe() - 1;
    [0, last.min(1), last]
}

fn without_gathered(memory: MemoryEstimate, case: &Case) -> f64 {
    let less = MemoryEstimate { gathered: 0.0, buffers: 0.0, slack: 0.0, ..memory };
    less.allocated() * (1.0 + case.software().slack) + less.reserve
}
