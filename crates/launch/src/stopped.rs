//! Notices that all ranks of a node are stopped. A stopped rank is missed by the other ranks, which report it; if all are
//! stopped, no rank is left to miss them.

use std::time::{Duration, Instant};

/// Time between two looks.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);

/// How long all ranks have been stopped.
#[derive(Default)]
pub(super) struct AllStopped {
    since: Option<Instant>,
}

impl AllStopped {
    /// Looks at the processes: whether all of them have been stopped at each look for at least `limit`.
    pub fn look(&mut self, pids: &[u32], limit: Duration) -> bool {
        if pids.is_empty() || !pids.iter().all(|pid| is_stopped(*pid)) {
            self.since = None;
            return false;
        }
        self.since.get_or_insert_with(Instant::now).elapsed() >= limit
    }
}

/// Whether a signal has stopped the process. A debugger that holds it does not count.
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before the state may contain anything.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}
