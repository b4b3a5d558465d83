//! Limits of a search: knobs that may be turned only so far.

use std::ops::RangeInclusive;

use super::candidate::{Candidate, Knob};

/// A knob between two answers.
pub type Turn = (Knob, RangeInclusive<usize>);

/// Which answers are allowed; of a knob that is not named, all.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Limits(pub Vec<Turn>);

impl Limits {
    pub fn with(&self, knob: Knob, answers: RangeInclusive<usize>) -> Limits {
        let mut turns = self.0.clone();
        turns.push((knob, answers));
        Limits(turns)
    }

    /// Whether a group has layouts that are allowed.
    pub(super) fn allow_group(&self, group: &Candidate) -> bool {
        self.0.iter().all(|(knob, answers)| !knob.early() || answers.contains(&knob.answer(group)))
    }

    pub(super) fn allow(&self, leaf: &Candidate) -> bool {
        self.0.iter().all(|(knob, answers)| answers.contains(&knob.answer(leaf)))
    }
}
