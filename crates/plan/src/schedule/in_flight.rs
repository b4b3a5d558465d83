//! Number of activations in flight on a rank.

use super::Schedule;
use super::action::Act;

/// Maximum number of stage passes of a rank in flight: micro-batches, times chunks if interleaved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InFlight {
    /// From the forward pass to the input gradient.
    pub until_input: usize,
    /// From the forward pass to the weight gradient. A backward pass that is not split ends both.
    pub until_weights: usize,
}

impl Schedule {
    pub fn in_flight(&self, rank: usize) -> InFlight {
        let acts = || self.actions[rank].iter().map(|action| action.act);
        let most = |last: Act| {
            let mut in_flight = 0_usize;
            let after_each = acts().map(|act| {
                if act == Act::Forward {
                    in_flight += 1;
                } else if act == Act::Backward || act == last {
                    in_flight = in_flight.saturating_sub(1);
                }
                in_flight
            });
            after_each.max().unwrap_or(0)
        };
        InFlight { until_input: most(Act::Input), until_weights: most(Act::Weights) }
    }
}
