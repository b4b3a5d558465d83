//! A schedule in simulated time: start and end of every action. A send is a delay that keeps neither rank busy.

use super::Schedule;
use super::action::{Act, Action};
use super::replay::{Deadlock, order};
use std::collections::HashMap;

/// Durations on one stage, in any unit.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Times {
    pub forward: f64,
    /// Input gradient: `B` of a split backward pass.
    pub input: f64,
    /// Weight gradient: `W`. A backward pass that is not split takes both.
    pub weights: f64,
    /// Message from one rank to another.
    pub send: f64,
}

/// Start and end of an action.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Span {
    pub action: Action,
    pub start: f64,
    pub end: f64,
}

/// The actions of all ranks in time.
#[derive(Clone, PartialEq, Debug)]
pub struct Timeline {
    pub ranks: Vec<Vec<Span>>, // (ranks, actions)
}

/// Starts every action as early as possible. `None` for a schedule that deadlocks; those of [`Schedule::new`] do not.
pub fn clock(schedule: &Schedule, times: &Times) -> Result<Timeline, Deadlock> {
    clock_with(schedule, |action| times.of(action.act), times.send)
}

/// [`clock`] with a duration for each action.
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
    /// Forward pass and both gradients take one unit each, sends take none.
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
    /// Time from the first start to the last end.
    pub fn makespan(&self) -> f64 {
        self.ranks.iter().flatten().map(|span| span.end).fold(0.0, f64::max)
    }

    /// Time from a rank's first start to its last end.
    pub fn span(&self, rank: usize) -> f64 {
        match self.ranks[rank].as_slice() {
            [] => 0.0,
            [first, .., last] => last.end - first.start,
            [only] => only.end - only.start,
        }
    }

    /// Time in which the rank works.
    pub fn busy(&self, rank: usize) -> f64 {
        self.ranks[rank].iter().map(|span| span.end - span.start).sum()
    }

    /// Time in which the rank waits.
    pub fn idle(&self, rank: usize) -> f64 {
        self.span(rank) - self.busy(rank)
    }

    /// Fraction of the longest span in which the busiest rank does not work: the bubble rate of the zero-bubble paper.
    /// It uses spans instead of the makespan because a rank that starts later may also end later, if it does not wait
    /// for the others before its optimizer step.
    pub fn bubble_rate(&self) -> f64 {
        let longest = |length: fn(&Timeline, usize) -> f64| {
            (0..self.ranks.len()).map(|rank| length(self, rank)).fold(0.0, f64::max)
        };
        let span = longest(Timeline::span);
        if span == 0.0 { 0.0 } else { 1.0 - longest(Timeline::busy) / span }
    }
}
