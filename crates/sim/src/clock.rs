//! Simulates a pipeline schedule. Gives the same times as `lockstep_plan::schedule::clock`, but on flat arrays, fast
//! enough for thousands of calls. Long steps are extrapolated, because they repeat after some rounds.

use lockstep_plan::schedule::{Act, Schedule, ScheduleKind};

/// Seconds of each stage per micro-batch, and of a message between two ranks.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PassTimes {
    pub forward: Vec<f64>, // (stages)
    /// Input gradient and weight gradient.
    pub input: Vec<f64>,
    pub weights: Vec<f64>,
    pub send: f64,
}

/// Finish times of the ranks.
#[derive(Clone, PartialEq, Debug)]
pub struct FinishTimes {
    pub last: Vec<f64>, // (ranks): end of the last action
    /// Time from the rank's first action to its last, and the busy time within it.
    pub span: Vec<f64>,
    pub busy: Vec<f64>,
}

/// Rounds of the pipeline after which a step is assumed to repeat. Long pipelines have longer rounds and need fewer;
/// schedules with deferred weight gradients settle later.
fn rounds(kind: ScheduleKind, ranks: usize) -> usize {
    match (kind.splits(), ranks) {
        (true, _) => 4,
        (false, ..=8) => 4,
        (false, _) => 2,
    }
}

/// Finish times of a step of `micros` micro-batches. Simulates some rounds of the pipeline and extrapolates with the
/// interval between micro-batches on the last stage.
pub fn finish_times(
    kind: ScheduleKind,
    ranks: usize,
    micros: usize,
    passes: &PassTimes,
) -> FinishTimes {
    let chunks = passes.forward.len() / ranks;
    let most = (rounds(kind, ranks) * ranks).max(8).next_multiple_of(ranks);
    let walked = if micros > most + ranks { most + micros % ranks } else { micros };
    let schedule = Schedule::new(kind, ranks, chunks, walked)
        .expect("the schedule of a plan is valid, also with a whole number of rounds less");
    let (mut times, interval) = walk(&schedule, passes);
    // The interval is at least the busy time of the busiest rank.
    let busiest = times.busy.iter().copied().fold(0.0, f64::max) / walked as f64;
    let interval = interval.max(busiest);
    let more = (micros - walked) as f64;
    for rank in 0..ranks {
        times.last[rank] += more * interval;
        times.span[rank] += more * interval;
        times.busy[rank] *= micros as f64 / walked as f64;
    }
    times
}

/// Runs every action as early as its rank and its inputs allow. Also returns the interval between micro-batches on the
/// last stage at the end of the step.
pub fn walk(schedule: &Schedule, passes: &PassTimes) -> (FinishTimes, f64) {
    let Schedule { ranks, micros, .. } = *schedule;
    let stages = schedule.stages();
    let mut forward = vec![f64::NAN; stages * micros]; // (stages, micros): when done; NaN: not yet
    let mut backward = vec![f64::NAN; stages * micros];
    let mut next = vec![0; ranks];
    let mut free = vec![0.0; ranks];
    let mut first = vec![f64::NAN; ranks];
    let mut busy = vec![0.0; ranks];
    // Each rank in turn runs all actions whose inputs are ready, until none can progress.
    let mut moved = true;
    while moved {
        moved = false;
        for rank in 0..ranks {
            while let Some(action) = schedule.actions[rank].get(next[rank]) {
                let at = action.stage * micros + action.micro;
                let message = if ranks > 1 { passes.send } else { 0.0 };
                let (ready, length) = match action.act {
                    Act::Forward if action.stage == 0 => (0.0, passes.forward[0]),
                    Act::Forward => (forward[at - micros] + message, passes.forward[action.stage]),
                    Act::Weights => (0.0, passes.weights[action.stage]),
                    both_or_input => {
                        let ready = match action.stage + 1 == stages {
                            true => 0.0,
                            false => backward[at + micros] + message,
                        };
                        let weights = match both_or_input {
                            Act::Backward => passes.weights[action.stage],
                            _ => 0.0,
                        };
                        (ready, passes.input[action.stage] + weights)
                    }
                };
                if ready.is_nan() {
                    break;
                }
                let start = ready.max(free[rank]);
                free[rank] = start + length;
                busy[rank] += length;
                if first[rank].is_nan() {
                    first[rank] = start;
                }
                match action.act {
                    Act::Forward => forward[at] = free[rank],
                    Act::Weights => {}
                    _ => backward[at] = free[rank],
                }
                next[rank] += 1;
                moved = true;
            }
        }
    }
    for (rank, next) in next.iter().enumerate() {
        assert_eq!(
            *next,
            schedule.actions[rank].len(),
            "deadlock: rank {rank} never finishes {:?}",
            schedule.kind
        );
    }
    let round = ranks.min(micros.saturating_sub(1));
    let mean_interval = |of_stage: &[f64]| match round {
        0 => 0.0,
        round => (of_stage[micros - 1] - of_stage[micros - 1 - round]) / round as f64,
    };
    let mut interval = mean_interval(&forward[(stages - 1) * micros..]);
    if schedule.kind == ScheduleKind::Gpipe {
        // Backward passes start after all forward passes of the last stage.
        interval += mean_interval(&backward[..micros]);
    }
    let span = free.iter().zip(&first).map(|(last, first)| last - first).collect();
    (FinishTimes { last: free, span, busy }, interval)
}

impl FinishTimes {
    /// Times of ranks that share a device: while one waits, the others get its share, so that the device is never idle and
    /// all ranks are done when the work of all is.
    pub fn on_one_device(mut self) -> FinishTimes {
        let done = self.busy.iter().sum::<f64>() / self.busy.len() as f64;
        self.last.fill(done);
        self.span.fill(done);
        self
    }

    /// Time at which all ranks are done.
    pub fn makespan(&self) -> f64 {
        self.last.iter().copied().fold(0.0, f64::max)
    }

    /// Fraction of the longest span in which the busiest rank is idle, as defined in the zero-bubble paper.
    pub fn bubble_rate(&self) -> f64 {
        let most = |of: &[f64]| of.iter().copied().fold(0.0, f64::max);
        let span = most(&self.span);
        if span == 0.0 { 0.0 } else { 1.0 - most(&self.busy) / span }
    }
}
