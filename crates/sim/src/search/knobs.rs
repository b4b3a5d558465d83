//! Limits of a search: allowed ranges of knobs.

use std::ops::RangeInclusive;

use super::candidate::{Candidate, Knob};

/// A knob and its allowed values.
pub type KnobRange = (Knob, RangeInclusive<usize>);

/// Allowed values of knobs; knobs that are not listed are free.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Limits(pub Vec<KnobRange>);

impl Limits {
    pub fn with(&self, knob: Knob, values: RangeInclusive<usize>) -> Limits {
        let mut ranges = self.0.clone();
        ranges.push((knob, values));
        Limits(ranges)
    }

    /// Whether a group may contain allowed layouts.
    pub(super) fn allow_group(&self, group: &Candidate) -> bool {
        self.0
            .iter()
            .all(|(knob, values)| !knob.fixed_in_group() || values.contains(&knob.value(group)))
    }

    pub(super) fn allow(&self, leaf: &Candidate) -> bool {
        self.0.iter().all(|(knob, values)| values.contains(&knob.value(leaf)))
    }
}
