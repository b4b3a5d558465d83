//! Notices that all ranks of a node are stopped. A stopped rank is missed by the other ranks, which report it; if all are
//! stopped, no rank is left to miss them.

use std::time::Duration;

/// Time between two looks.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);

/// How often all ranks were found stopped, one look after the other.
#[derive(Default)]
pub(super) struct AllStopped {
    looks: u32,
}

impl AllStopped {
    /// Looks at the processes: whether all of them were stopped at as many looks as fit into `limit`. Counts looks, not
    /// time, which passes while the launcher itself is stopped.
    pub fn look(&mut self, pids: &[u32], limit: Duration) -> bool {
        let all = !pids.is_empty() && pids.iter().all(|pid| is_stopped(*pid));
        self.looks = if all { self.looks + 1 } else { 0 };
        all && self.looks * INTERVAL >= limit
    }
}

/// Whether a signal has stopped the process. A debugger that holds it does not count.
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before the state may contain anything.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}
