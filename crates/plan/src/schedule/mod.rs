//! Pipeline schedules as lists of actions: which rank runs which pass of which micro-batch, in which order. The executor
//! and the simulator use the same lists. README.md explains the schedules.
//!
//! 1F1B on 4 ranks with 8 micro-batches, where a backward pass takes twice the time of a forward pass:
//!
//! ```
//! use lockstep_plan::schedule::{ScheduleKind, Schedule, Times, clock};
//!
//! let schedule = Schedule::new(ScheduleKind::OneForwardOneBackward, 4, 1, 8).unwrap();
//! assert_eq!(schedule.to_string().lines().last(), Some("3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7"));
//!
//! let timeline = clock(&schedule, &Times::EVEN).unwrap();
//! let drawn = "\
//! rank 0  F0 F1 F2 F3 ..................B0    F4 B1    F5 B2    F6 B3    F7 B4    ...B5    ...B6    ...B7
//! rank 1  ...F0 F1 F2 ............B0    F3 B1    F4 B2    F5 B3    F6 B4    F7 B5    ...B6    ...B7    ......
//! rank 2  ......F0 F1 ......B0    F2 B1    F3 B2    F4 B3    F5 B4    F6 B5    F7 B6    ...B7    ............
//! rank 3  .........F0 B0    F1 B1    F2 B2    F3 B3    F4 B4    F5 B5    F6 B6    F7 B7    ..................
//! ";
//! assert_eq!(timeline.draw(1.0), drawn);
//!
//! // Every rank idles for (ranks - 1) forward and backward passes: 9 of 33.
//! assert_eq!(schedule.bubble(&Times::EVEN), Some(9.0));
//! assert!((timeline.bubble_rate() - 9.0 / 33.0).abs() < 1e-12);
//! ```

mod action;
mod check;
mod clock;
mod draw;
mod gpipe;
mod in_flight;
mod interleaved;
mod kind;
mod messages;
mod one_forward_one_backward;
mod received;
mod replay;
mod text;
mod zero_bubble;

pub use action::{Act, Action};
pub use clock::{Span, Timeline, Times, clock, clock_with};
pub use in_flight::InFlight;
pub use kind::ScheduleKind;
pub use messages::{Message, PipelineStep};
pub use replay::{Deadlock, Wait, replay};

use crate::resolve::near::multiples;
use serde::{Deserialize, Serialize};

/// The actions of every rank in one optimizer step, in order. Created by [`Schedule::new`] or parsed from text or JSON; a
/// parsed schedule must pass [`Schedule::check`] and [`replay`] before use.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "text::Written", into = "text::Written")]
pub struct Schedule {
    pub kind: ScheduleKind,
    pub ranks: usize,
    /// Stages per rank; more than one only if interleaved.
    pub chunks: usize,
    pub micros: usize,
    pub actions: Vec<Vec<Action>>, // (ranks, actions)
}

impl Schedule {
    /// The schedule of a kind, or the reason why it does not exist and a suggestion.
    pub fn new(
        kind: ScheduleKind,
        ranks: usize,
        chunks: usize,
        micros: usize,
    ) -> Result<Schedule, String> {
        possible(kind, ranks, chunks, micros)?;
        let list = |rank| match kind {
            ScheduleKind::Gpipe => gpipe::actions(rank, micros),
            ScheduleKind::OneForwardOneBackward => {
                one_forward_one_backward::actions(rank, ranks, micros)
            }
            ScheduleKind::Interleaved => interleaved::actions(rank, ranks, chunks, micros),
            ScheduleKind::ZbH1 => zero_bubble::h1(rank, ranks, micros),
            ScheduleKind::ZbH2 => zero_bubble::h2(rank, ranks, micros),
        };
        Ok(Schedule { kind, ranks, chunks, micros, actions: (0..ranks).map(list).collect() })
    }

    /// Number of pipeline stages.
    pub fn stages(&self) -> usize {
        self.ranks * self.chunks
    }

    /// The rank of a stage. Stages are assigned round-robin.
    pub fn rank_of(&self, stage: usize) -> usize {
        stage % self.ranks
    }

    /// Idle time of the idlest rank between its first and last action, by formula, for equal stages and free sends. `None`
    /// if there are too few micro-batches for the formula; [`clock`] covers those too.
    pub fn bubble(&self, times: &Times) -> Option<f64> {
        match self.kind {
            ScheduleKind::Gpipe => Some(gpipe::bubble(self.ranks, times)),
            ScheduleKind::OneForwardOneBackward => {
                Some(one_forward_one_backward::bubble(self.ranks, times))
            }
            ScheduleKind::Interleaved => Some(interleaved::bubble(self.ranks, times)),
            ScheduleKind::ZbH1 => zero_bubble::h1_bubble(self.ranks, self.micros, times),
            ScheduleKind::ZbH2 => zero_bubble::h2_bubble(self.ranks, self.micros, times),
        }
    }
}

/// Checks whether such a schedule exists.
pub(crate) fn possible(
    kind: ScheduleKind,
    ranks: usize,
    chunks: usize,
    micros: usize,
) -> Result<(), String> {
    for (name, value) in [("ranks", ranks), ("chunks", chunks), ("micros", micros)] {
        if value == 0 {
            return Err(format!("{kind} with {name}=0 does nothing; {name} must be at least 1"));
        }
    }
    if kind != ScheduleKind::Interleaved && chunks > 1 {
        return Err(format!(
            "{kind} has one stage per rank, not chunks={chunks}; try chunks=1, or interleaved"
        ));
    }
    if kind == ScheduleKind::Interleaved && !micros.is_multiple_of(ranks) {
        let near = multiples(micros, ranks);
        return Err(format!(
            "interleaved takes micro-batches in rounds of ranks={ranks}, which does not divide micros={micros}; try {near}"
        ));
    }
    Ok(())
}
