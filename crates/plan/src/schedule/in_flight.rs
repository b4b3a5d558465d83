//! How many activations a rank holds at once.

use super::Schedule;
use super::action::Act;

/// The most stage-passes of a rank that are begun and not done: micro-batches, times chunks when interleaved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InFlight {
    /// From forward to the input gradient: what only that needs.
    pub until_input: usize,
    /// From forward to the weight gradient. A backward that is not split ends both.
    pub until_weights: usize,
}

impl Schedule {
    pub fn in_flight(&self, rank: usize) -> InFlight {
        let acts = || self.actions[rank].iter().map(|action| action.act);
        let most = |last: Act| {
            let mut held = 0_usize;
            let held_after = acts().map(|act| {
                if act == Act::Forward {
                    held += 1;
                } else if act == Act::Backward || act == last {
                    held = held.saturating_sub(1);
                }
                held
            });
            held_after.max().unwrap_or(0)
        };
        InFlight { until_input: most(Act::Input), until_weights: most(Act::Weights) }
    }
}
