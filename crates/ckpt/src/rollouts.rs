//! Which rollouts an online learner has learned from: a small value that goes into the checkpoint beside the
//! weights, so that after a crash the two agree, and every rollout is learned from once or told that it is not
//! wanted. Knows nothing of what a rollout contains, and moves none.
//!
//! Each producer numbers its rollouts from 0 and sends again what it has no answer for. [`Ledger::accept`] answers
//! each of them:
//!
//! ```text
//!             settled                     the window
//!   ───────────────────────────┬───────────────────────────────
//!   0 1 2 3 4 5 6 7 8 9 10 11  │ 12   13   14   15   16   17 …
//!   x x x x x x x x x x  x  x  │  ·    x    x    ·    x    ·        x: settled, they came out of order
//!                              └ cursor: the lowest number that is not settled
//! ```
//!
//! A number is settled by its first answer, whatever that was, and for good: who sends it again hears `Duplicate`.
//! When a number arrives that lies beyond the window, the lowest open ones are given up to make room; such a
//! rollout hears `Stale` should it come after all.
//!
//! The ledger is a plain state machine: ranks that show it the same rollouts in the same order hold the same
//! ledger. Three habits make a learner exact:
//!
//! - what was accepted is learned from before the next checkpoint is made, and ledger and weights are saved
//!   together (`Carried::learner`);
//! - the version is advanced (`advance`) before the new policy is given to producers;
//! - a producer keeps a rollout until a checkpoint has settled it (`is_settled` of the ledger in that checkpoint),
//!   and after a recovery sends again from `cursor` on: answers that were given after the checkpoint have gone
//!   with the crash.
//!
//! ```
//! use lockstep_ckpt::rollouts::{Ledger, Rollout, Verdict};
//!
//! let mut ledger = Ledger::new(1, 64);
//! let rollout = |sequence, version| Rollout { producer: "a".into(), sequence, version };
//! assert_eq!(ledger.accept(&rollout(0, 0)), Verdict::Accepted);
//! assert_eq!(ledger.accept(&rollout(0, 0)), Verdict::Duplicate);
//! assert_eq!(ledger.accept(&rollout(1, 1)), Verdict::FutureVersion);
//! (0..2).for_each(|_| drop(ledger.advance()));
//! assert_eq!(ledger.accept(&rollout(2, 0)), Verdict::Stale);
//! assert_eq!(ledger.cursor("a"), 3);
//! ```

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// What of a rollout decides whether it is learned from.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Rollout {
    pub producer: String,
    /// The producer's own count, from 0. A number never means two rollouts.
    pub sequence: u64,
    /// Of the policy that made it.
    pub version: u64,
}

/// What becomes of a rollout.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It is to be learned from, once.
    Accepted,
    /// Made by a policy that is too old, or so late that its number was given up.
    Stale,
    /// The number has had its answer.
    Duplicate,
    /// Made by a policy that this learner has not reached: one that went with a crash.
    FutureVersion,
}

/// What a learner remembers of all rollouts so far.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ledger {
    policy_version: u64,
    /// A policy may be this many versions behind the learner's.
    max_lag: u64,
    /// How far above the cursor numbers may be settled.
    window: u64,
    producers: BTreeMap<String, Producer>,
    told: Told,
}

/// How often each verdict was given.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Told {
    pub accepted: u64,
    pub stale: u64,
    pub duplicate: u64,
    pub future_version: u64,
}

#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
struct Producer {
    /// Every number below is settled or given up.
    cursor: u64,
    /// Numbers above the cursor that are settled.
    window: BTreeSet<u64>,
    /// Runs of numbers below the cursor that never came: first, and one past the last.
    given_up: BTreeMap<u64, u64>,
}

impl Ledger {
    /// Of a learner at version 0 that has seen nothing.
    ///
    /// # Panics
    /// When the window has no room for a single number.
    pub fn new(max_lag: u64, window: u64) -> Ledger {
        assert!(window > 0, "a window of 0 numbers has no room for a rollout; 1024 is plenty");
        let (producers, told) = (BTreeMap::new(), Told::default());
        Ledger { policy_version: 0, max_lag, window, producers, told }
    }

    /// Whether to learn from a rollout. The answer is final: the number is settled by it.
    pub fn accept(&mut self, rollout: &Rollout) -> Verdict {
        let verdict = self.judge(rollout);
        let Told { accepted, stale, duplicate, future_version } = &mut self.told;
        *match verdict {
            Verdict::Accepted => accepted,
            Verdict::Stale => stale,
            Verdict::Duplicate => duplicate,
            Verdict::FutureVersion => future_version,
        } += 1;
        verdict
    }

    fn judge(&mut self, rollout: &Rollout) -> Verdict {
        // The cursor could not go past it; nobody has counted so far.
        if rollout.sequence == u64::MAX {
            return Verdict::Stale;
        }
        let producer = self.producers.entry(rollout.producer.clone()).or_default();
        match producer.settle(rollout.sequence, self.window) {
            Settled::Before => Verdict::Duplicate,
            Settled::GivenUp => Verdict::Stale,
            Settled::Now if rollout.version > self.policy_version => Verdict::FutureVersion,
            Settled::Now if self.policy_version - rollout.version > self.max_lag => Verdict::Stale,
            Settled::Now => Verdict::Accepted,
        }
    }

    /// The learner has a new policy: its version. Called before the policy is given to anybody.
    pub fn advance(&mut self) -> u64 {
        self.policy_version += 1;
        self.policy_version
    }

    pub fn policy_version(&self) -> u64 {
        self.policy_version
    }

    /// The lowest number of a producer that is not settled: from here it sends again after a recovery.
    pub fn cursor(&self, producer: &str) -> u64 {
        self.producers.get(producer).map_or(0, |producer| producer.cursor)
    }

    /// Whether a number has had its answer, so that the producer may forget the rollout once this ledger is in a
    /// checkpoint.
    pub fn is_settled(&self, producer: &str, sequence: u64) -> bool {
        let known = self.producers.get(producer);
        known.is_some_and(|known| sequence < known.cursor || known.window.contains(&sequence))
    }

    /// Everybody who has sent something.
    pub fn producers(&self) -> impl Iterator<Item = &str> {
        self.producers.keys().map(String::as_str)
    }

    /// How often each verdict was given, in the history that led to this state.
    pub fn told(&self) -> Told {
        self.told
    }
}

enum Settled {
    /// By an earlier answer.
    Before,
    /// It was given up, and comes now.
    GivenUp,
    Now,
}

impl Producer {
    fn settle(&mut self, sequence: u64, room: u64) -> Settled {
        if sequence < self.cursor {
            return if self.recover(sequence) { Settled::GivenUp } else { Settled::Before };
        }
        if !self.window.insert(sequence) {
            return Settled::Before;
        }
        // The window is [cursor, cursor + room): what lies below it has had its time.
        self.give_up_below(sequence.saturating_sub(room - 1));
        while self.window.remove(&self.cursor) {
            self.cursor += 1;
        }
        Settled::Now
    }

    /// Moves the cursor up to a number, noting what never came.
    fn give_up_below(&mut self, lowest: u64) {
        while self.cursor < lowest {
            let next = self.window.first().map_or(lowest, |next| (*next).min(lowest));
            if next > self.cursor {
                self.note(self.cursor, next);
                self.cursor = next;
            }
            while self.window.remove(&self.cursor) {
                self.cursor += 1;
            }
        }
    }

    fn note(&mut self, first: u64, end: u64) {
        match self.given_up.last_entry() {
            Some(mut last) if *last.get() == first => *last.get_mut() = end,
            _ => drop(self.given_up.insert(first, end)),
        }
    }

    /// Takes a number out of those that were given up; false when it was not among them.
    fn recover(&mut self, sequence: u64) -> bool {
        let found = self.given_up.range(..=sequence).next_back().map(|(first, end)| (*first, *end));
        let Some((first, end)) = found.filter(|(_, end)| sequence < *end) else { return false };
        self.given_up.remove(&first);
        for (first, end) in [(first, sequence), (sequence + 1, end)] {
            if first < end {
                self.given_up.insert(first, end);
            }
        }
        true
    }
}
