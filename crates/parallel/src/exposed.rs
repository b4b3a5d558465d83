//! Time that a rank spends on exchanges that nothing hides.

use std::cell::Cell;
use std::time::{Duration, Instant};

#[derive(Default)]
pub(crate) struct Exposed(Cell<Duration>);

impl Exposed {
    /// Does something that the rank waits for, on the clock.
    pub fn timed<R>(&self, exchange: impl FnOnce() -> R) -> R {
        let begun = Instant::now();
        let result = exchange();
        self.0.set(self.0.get() + begun.elapsed());
        result
    }

    /// Since it was last asked.
    pub fn take(&self) -> Duration {
        self.0.take()
    }
}
