//! A schedule in simulated time: when each rank begins and ends each action. A send is a delay between two
//! ranks and keeps neither of them busy.

use super::Schedule;
use super::action::{Act, Action};
use super::replay::{Deadlock, order};
use std::collections::HashMap;

/// How long things take on one stage, in any unit.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Times {
    pub forward: f64,
    /// The gradient of the input: `B` of a split backward.
    pub input: f64,
    /// The gradient of the weights: `W`. A backward that is not split takes both.
    pub weights: f64,
    /// From one rank to another.
    pub send: f64,
}

/// One action in time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Span {
    pub action: Action,
    pub start: f64,
    pub end: f64,
}

/// What every rank does when.
#[derive(Clone, PartialEq, Debug)]
pub struct Timeline {
    pub ranks: Vec<Vec<Span>>, // (ranks, what the rank does)
}

/// Every action as early as its rank and what it waits for allow. Only a schedule that cannot end, which
/// none from [`Schedule::new`] is, has no timeline.
pub fn clock(schedule: &Schedule, times: &Times) -> Result<Timeline, Deadlock> {
    clock_with(schedule, |action| times.of(action.act), times.send)
}

/// [`clock`] for stages that differ: `lasts` is asked for every action.
pub fn clock_with(
    schedule: &Schedule,
    lasts: impl Fn(Action) -> f64,
    send: f64,
) -> Result<Timeline, Deadlock> {
    let mut ends: HashMap<Action, f64> = HashMap::new();
    let mut ranks: Vec<Vec<Span>> = vec![Vec::new(); schedule.actions.len()];
    for (rank, action) in order(schedule, None)? {
        let free = ranks[rank].last().map_or(0.0, |span| span.end);
        let arrived = action.takes_from(schedule.stages()).map_or(0.0, |source| {
            let away = schedule.rank_of(source.stage) != rank;
            ends[&source] + if away { send } else { 0.0 }
        });
        let start = free.max(arrived);
        let end = start + lasts(action);
        ends.insert(action, end);
        ranks[rank].push(Span { action, start, end });
    }
    Ok(Timeline { ranks })
}

impl Times {
    /// Forward and both gradients take the same time, sends none.
    pub const EVEN: Times = Times { forward: 1.0, input: 1.0, weights: 1.0, send: 0.0 };

    pub fn of(&self, act: Act) -> f64 {
        match act {
            Act::Forward => self.forward,
            Act::Backward => self.input + self.weights,
            Act::Input => self.input,
            Act::Weights => self.weights,
        }
    }
}

impl Timeline {
    /// From the first start to the last end of all ranks.
    pub fn makespan(&self) -> f64 {
        self.ranks.iter().flatten().map(|span| span.end).fold(0.0, f64::max)
    }

    /// From the rank's first start to its last end.
    pub fn span(&self, rank: usize) -> f64 {
        match self.ranks[rank].as_slice() {
            [] => 0.0,
            [first, .., last] => last.end - first.start,
            [only] => only.end - only.start,
        }
    }

    /// What the rank works of that.
    pub fn busy(&self, rank: usize) -> f64 {
        self.ranks[rank].iter().map(|span| span.end - span.start).sum()
    }

    /// What it waits of that.
    pub fn idle(&self, rank: usize) -> f64 {
        self.span(rank) - self.busy(rank)
    }

    /// The share of the longest span that is not work of the busiest rank: the bubble rate of the zero-bubble
    /// paper. Spans and not the makespan, because steps follow each other: a rank that begins later may end
    /// later, if it need not wait for the others before its optimizer.
    pub fn bubble_rate(&self) -> f64 {
        let longest = |length: fn(&Timeline, usize) -> f64| {
            (0..self.ranks.len()).map(|rank| length(self, rank)).fold(0.0, f64::max)
        };
        let span = longest(Timeline::span);
        if span == 0.0 { 0.0 } else { 1.0 - longest(Timeline::busy) / span }
    }

    /// The share of the makespan in which the average rank does not work: what is lost when all ranks wait for
    /// each other at the end of a step.
    pub fn idle_rate(&self) -> f64 {
        let all = self.makespan() * self.ranks.len() as f64;
        let busy: f64 = (0..self.ranks.len()).map(|rank| self.busy(rank)).sum();
        if all == 0.0 { 0.0 } else { 1.0 - busy / all }
    }
}
