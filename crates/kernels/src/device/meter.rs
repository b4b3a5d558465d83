//! Where the time of a step goes, operation by operation. Off, it costs one load per operation.

use lockstep_types::OpClass;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Time by operation, while it is switched on.
pub struct Meter {
    on: AtomicBool,
    nanos: [AtomicU64; OpClass::ALL.len()],
}

impl Meter {
    pub(super) fn new() -> Meter {
        Meter { on: AtomicBool::new(false), nanos: Default::default() }
    }

    /// Starts from zero, or stops.
    pub fn switch(&self, on: bool) {
        if on {
            self.nanos.iter().for_each(|nanos| nanos.store(0, Relaxed));
        }
        self.on.store(on, Relaxed);
    }

    /// What an operation took since the meter was switched on.
    pub fn spent(&self, operation: OpClass) -> Duration {
        Duration::from_nanos(self.nanos[operation as usize].load(Relaxed))
    }

    pub(super) fn time<R>(&self, operation: OpClass, work: impl FnOnce() -> R) -> R {
        if !self.on.load(Relaxed) {
            return work();
        }
        let start = Instant::now();
        let result = work();
        self.nanos[operation as usize].fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
        result
    }
}
