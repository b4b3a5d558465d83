//! A clock for exposed communication: time that a rank waits for collectives instead of computing.

use std::cell::Cell;
use std::time::{Duration, Instant};

#[derive(Default)]
pub(crate) struct Exposed(Cell<Duration>);

impl Exposed {
    /// Counts the time of `communication`.
    pub fn timed<R>(&self, communication: impl FnOnce() -> R) -> R {
        let begin = Instant::now();
        let result = communication();
        self.0.set(self.0.get() + begin.elapsed());
        result
    }

    /// The time since the last call.
    pub fn take(&self) -> Duration {
        self.0.take()
    }
}
