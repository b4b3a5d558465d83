//! Limits how often a message is logged, and counts the omitted ones. Time is passed in.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// At most this many lines per interval, so that a flood of connections cannot fill a disk with logs.
const LINES: u32 = 10;
const INTERVAL: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Throttle(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    since: Option<Instant>,
    lines: u32,
    omitted: u64,
}

impl Throttle {
    /// Whether to log a message now; if so, the number of messages omitted before it.
    pub fn admit(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.since.is_none_or(|since| now >= since + INTERVAL) {
            (state.since, state.lines) = (Some(now), 0);
        }
        if state.lines == LINES {
            state.omitted += 1;
            return None;
        }
        state.lines += 1;
        Some(std::mem::take(&mut state.omitted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_bad_connections_is_logged_in_a_few_lines() {
        let (throttle, start) = (Throttle::default(), Instant::now());
        let admitted = |seconds| throttle.admit(start + Duration::from_secs(seconds));
        let lines: Vec<u64> = (0..10_000).filter_map(|_| admitted(1)).collect();
        assert_eq!(lines, [0; LINES as usize]);
        assert_eq!(admitted(60), None);
        // The first line of the next interval says how many are missing.
        assert_eq!(admitted(61), Some(9_991));
        assert_eq!(admitted(62), Some(0));
    }
}
