//! A pipeline timeline, short enough to be drawn.

use lockstep_plan::schedule::{Act, Action, Schedule, Timeline, clock_with};

use crate::search::Proposal;

/// Timeline of a step, truncated to about `most` micro-batches.
pub fn timeline(proposal: &Proposal, most: usize) -> Option<Timeline> {
    let (plan, stages) = (&proposal.plan, &proposal.estimate.stages);
    let whole = plan.schedule();
    // Interleaved schedules need a multiple of the ranks.
    let micros = whole.micros.min(most.max(whole.ranks).next_multiple_of(whole.ranks));
    let schedule = Schedule::new(whole.kind, whole.ranks, whole.chunks, micros).ok()?;
    let chunks = whole.chunks as f64;
    let lasts = |action: Action| {
        let stage = &stages[action.stage % whole.ranks];
        let seconds = match action.act {
            Act::Forward => stage.forward,
            Act::Input => stage.input,
            Act::Weights => stage.weights,
            Act::Backward => stage.input + stage.weights,
        };
        seconds / chunks
    };
    clock_with(&schedule, lasts, 0.0).ok()
}
