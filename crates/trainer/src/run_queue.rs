//! Time that the calling thread could have run but waited for a core: evidence that the host is busy.

use std::time::Duration;

/// Time in the run queue since the last call. Zero where the kernel does not report it.
#[derive(Default)]
pub(crate) struct RunQueue {
    last: Option<u64>,
}

impl RunQueue {
    pub fn take(&mut self) -> Duration {
        let now = read();
        let waited = match (self.last, now) {
            (Some(last), Some(now)) => now.saturating_sub(last),
            _ => 0,
        };
        self.last = now;
        Duration::from_nanos(waited)
    }
}

/// The second number of schedstat: nanoseconds in the run queue.
fn read() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split_whitespace().nth(1)?.parse().ok()
}
