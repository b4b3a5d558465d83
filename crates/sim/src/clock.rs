//! A schedule in simulated time, on flat arrays: what `lockstep_plan::schedule::clock` finds, fast enough to be
//! asked thousands of times. Long steps are not walked to their end: after some rounds they repeat.

use lockstep_plan::schedule::{Act, Schedule, ScheduleKind};

/// How long each stage takes for a micro-batch, and a message between two ranks.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PassTimes {
    pub forward: Vec<f64>, // (stages)
    /// The gradient of the input, and of the weights.
    pub input: Vec<f64>,
    pub weights: Vec<f64>,
    pub send: f64,
}

/// When ranks are done.
#[derive(Clone, PartialEq, Debug)]
pub struct FinishTimes {
    pub last: Vec<f64>, // (ranks): end of the last action
    /// From the rank's first action to its last, and what it works of that.
    pub span: Vec<f64>,
    pub busy: Vec<f64>,
}

/// Rounds of the pipeline after which a step is taken to repeat: fewer of long pipelines, whose rounds are longer.
/// Schedules that put weights off come to it later.
fn rounds(kind: ScheduleKind, ranks: usize) -> usize {
    match (kind.splits(), ranks) {
        (true, _) => 4,
        (false, ..=8) => 4,
        (false, _) => 2,
    }
}

/// When ranks are done with a step of `micros` micro-batches. Walks at most some rounds of the pipeline, and goes on
/// from there at the pace of the last stage.
pub fn ends(kind: ScheduleKind, ranks: usize, micros: usize, lasts: &PassTimes) -> FinishTimes {
    let chunks = lasts.forward.len() / ranks;
    let most = (rounds(kind, ranks) * ranks).max(8).next_multiple_of(ranks);
    let walked = if micros > most + ranks { most + micros % ranks } else { micros };
    let schedule = Schedule::new(kind, ranks, chunks, walked)
        .expect("a plan has a schedule that exists, and with as many micro-batches more or less a round of it");
    let (mut ends, pace) = walk(&schedule, lasts);
    // In the long run no rank works more than the busiest has time for.
    let busiest = ends.busy.iter().copied().fold(0.0, f64::max) / walked as f64;
    let pace = pace.max(busiest);
    let more = (micros - walked) as f64;
    for rank in 0..ranks {
        ends.last[rank] += more * pace;
        ends.span[rank] += more * pace;
        ends.busy[rank] *= micros as f64 / walked as f64;
    }
    ends
}

/// Every action of a schedule as early as its rank and what it waits for allow; and the time between two
/// micro-batches on the last stage, in the end.
pub fn walk(schedule: &Schedule, lasts: &PassTimes) -> (FinishTimes, f64) {
    let Schedule { ranks, micros, .. } = *schedule;
    let stages = schedule.stages();
    let mut forward = vec![f64::NAN; stages * micros]; // (stages, micros): when done; not a number: not yet
    let mut backward = vec![f64::NAN; stages * micros];
    let mut next = vec![0; ranks];
    let mut free = vec![0.0; ranks];
    let mut first = vec![f64::NAN; ranks];
    let mut busy = vec![0.0; ranks];
    // Ranks take turns, each going as far as it can: whom one waits for has its turn before it comes again.
    let mut moved = true;
    while moved {
        moved = false;
        for rank in 0..ranks {
            while let Some(action) = schedule.actions[rank].get(next[rank]) {
                let at = action.stage * micros + action.micro;
                let away = if ranks > 1 { lasts.send } else { 0.0 };
                let (came, length) = match action.act {
                    Act::Forward if action.stage == 0 => (0.0, lasts.forward[0]),
                    Act::Forward => (forward[at - micros] + away, lasts.forward[action.stage]),
                    Act::Weights => (0.0, lasts.weights[action.stage]),
                    both_or_input => {
                        let came = match action.stage + 1 == stages {
                            true => 0.0,
                            false => backward[at + micros] + away,
                        };
                        let weights = match both_or_input {
                            Act::Backward => lasts.weights[action.stage],
                            _ => 0.0,
                        };
                        (came, lasts.input[action.stage] + weights)
                    }
                };
                if came.is_nan() {
                    break;
                }
                let start = came.max(free[rank]);
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
            "rank {rank} waits for ever in {:?}",
            schedule.kind
        );
    }
    let round = ranks.min(micros.saturating_sub(1));
    let between = |of_stage: &[f64]| match round {
        0 => 0.0,
        round => (of_stage[micros - 1] - of_stage[micros - 1 - round]) / round as f64,
    };
    let mut pace = between(&forward[(stages - 1) * micros..]);
    if schedule.kind == ScheduleKind::Gpipe {
        // All the rest comes when the last stage's forward passes are over.
        pace += between(&backward[..micros]);
    }
    let span = free.iter().zip(&first).map(|(last, first)| last - first).collect();
    (FinishTimes { last: free, span, busy }, pace)
}

impl FinishTimes {
    /// Until all ranks are done.
    pub fn makespan(&self) -> f64 {
        self.last.iter().copied().fold(0.0, f64::max)
    }

    /// The share of the longest span that is not work of the busiest rank, as in the zero-bubble paper.
    pub fn bubble_rate(&self) -> f64 {
        let most = |of: &[f64]| of.iter().copied().fold(0.0, f64::max);
        let span = most(&self.span);
        if span == 0.0 { 0.0 } else { 1.0 - most(&self.busy) / span }
    }
}
