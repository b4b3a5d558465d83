//! The pipeline in simulated time, drawn from the estimate's stages: short enough to be looked at.

use lockstep_plan::schedule::{Act, Action, Schedule, Timeline, clock_with};

use crate::search::Proposal;

/// What the stages of a proposal do in a step of at most `most` micro-batches, of which a longer step has more.
pub fn timeline(proposal: &Proposal, most: usize) -> Option<Timeline> {
    let (plan, stages) = (&proposal.plan, &proposal.estimate.stages);
    let whole = plan.schedule();
    // Interleaved schedules go in rounds of as many micro-batches as there are ranks.
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
