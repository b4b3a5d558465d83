//! Alignment of the ranks' clocks. A rank asks rank 0 for its time and halves the round trip, as NTP does; the answer of
//! the fastest round trip counts, and half of it bounds the error. Samples before and after the traced steps also
//! correct the drift. Reads no clock.

use serde::{Deserialize, Serialize};

/// One question to rank 0, in nanoseconds: our clock when it was asked and answered, and rank 0's clock in between.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClockSample {
    pub asked: u64,
    pub answered: u64,
    pub reference: u64,
}

/// Largest drift between two clocks. Quartz clocks stay well below it.
const MAX_DRIFT: f64 = 2e-4;

/// Maps a rank's clock to that of rank 0. The default is the identity.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct ClockFit {
    /// Time of this rank at which the offset holds.
    pub at: u64,
    /// Nanoseconds to add to this rank's time.
    pub offset: f64,
    /// Change of the offset per nanosecond.
    pub drift: f64,
    /// Bound of the error in nanoseconds.
    pub error: f64,
}

impl ClockFit {
    /// Fits the samples taken before and after the traced steps.
    pub fn of(before: &[ClockSample], after: &[ClockSample]) -> ClockFit {
        match (best(before), best(after)) {
            (None, None) => ClockFit::default(),
            (Some(one), None) | (None, Some(one)) => {
                ClockFit { at: one.at, offset: one.offset, drift: 0.0, error: one.error }
            }
            (Some(first), Some(last)) => {
                let elapsed = last.at.saturating_sub(first.at).max(1) as f64;
                let change = last.offset - first.offset;
                // A change within the errors says nothing about the drift.
                if change.abs() <= first.error + last.error {
                    let one = if first.error <= last.error { first } else { last };
                    return ClockFit {
                        at: one.at,
                        offset: one.offset,
                        drift: 0.0,
                        error: one.error,
                    };
                }
                let drift = (change / elapsed).clamp(-MAX_DRIFT, MAX_DRIFT);
                let error = first.error.max(last.error);
                ClockFit { at: first.at, offset: first.offset, drift, error }
            }
        }
    }

    /// A time of this rank on the common clock; may be negative.
    pub fn map(&self, time: u64) -> i64 {
        let since = time as f64 - self.at as f64;
        (time as f64 + self.offset + self.drift * since).round() as i64
    }
}

struct Best {
    at: u64,
    offset: f64,
    error: f64,
}

/// The sample with the shortest round trip.
fn best(samples: &[ClockSample]) -> Option<Best> {
    let sample =
        samples.iter().min_by_key(|sample| sample.answered.saturating_sub(sample.asked))?;
    let round_trip = sample.answered.saturating_sub(sample.asked);
    let at = sample.asked + round_trip / 2;
    let offset = sample.reference as f64 - (sample.asked as f64 + round_trip as f64 / 2.0);
    Some(Best { at, offset, error: round_trip as f64 / 2.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(asked: u64, round_trip: u64, reference: u64) -> ClockSample {
        ClockSample { asked, answered: asked + round_trip, reference }
    }

    #[test]
    fn the_fastest_round_trip_counts() {
        let fit = ClockFit::of(&[sample(100, 1000, 9_000), sample(2_000, 20, 7_010)], &[]);
        assert_eq!((fit.offset, fit.error), (5_000.0, 10.0));
        assert_eq!(fit.map(3_000), 8_000);
    }

    #[test]
    fn drift_is_corrected() {
        // Our clock is 100 ppm slow: 1,000,000 of ours are 1,000,100 of rank 0's.
        let fit = ClockFit::of(&[sample(0, 0, 500)], &[sample(1_000_000, 0, 1_000_600)]);
        assert_eq!(fit.map(500_000), 500_550);
        assert_eq!(ClockFit::of(&[], &[]).map(77), 77);
        // Slow answers look like a drift, but are within the error.
        let fit = ClockFit::of(&[sample(0, 100, 550)], &[sample(10_000, 4_000, 13_000)]);
        assert_eq!((fit.drift, fit.error, fit.map(10_000)), (0.0, 50.0, 10_500));
    }
}
