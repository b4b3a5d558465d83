//! Parameters that ZeRO-3 has gathered at once.

use super::Usage;
use crate::model::Part;
use crate::plan::Plan;
use crate::reduction::{Event, RankReductions, StateOp};

/// Peak bytes of gathered parameters, including those gathered ahead.
pub(super) fn peak(
    plan: &Plan,
    part: &Part,
    reductions: &RankReductions,
    events: &[Event],
) -> usize {
    if !reductions.policy.gather.shards_parameters() {
        return 0;
    }
    let size = |block: usize| plan.precision.compute.bytes() * part.blocks[block].len();
    let mut usage = Usage::default();
    for event in events {
        let Event::State(call) = event else { continue };
        match call.op {
            StateOp::Gather { block } => usage.take(size(block)),
            StateOp::Release { block } => usage.give(size(block)),
            StateOp::Reduce { .. } | StateOp::Sum(_) => {}
        }
    }
    usage.peak
}
