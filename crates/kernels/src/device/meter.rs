//! Time per class of operation. While it is off, the meter costs one load per operation.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use lockstep_types::OpClass;

use super::Event;

/// Time spent per class of operation, measured while the meter is on.
pub struct Meter {
    on: AtomicBool,
    times: Mutex<Times>,
}

#[derive(Default)]
struct Times {
    spent: [Duration; OpClass::ALL.len()],
    /// Operations that the device may not have completed yet, with the events around them.
    pending: Vec<(OpClass, Event, Event)>,
}

impl Times {
    fn settle(&mut self) {
        for (operation, start, end) in self.pending.drain(..) {
            self.spent[operation as usize] += end.elapsed_since(&start);
        }
    }
}

impl Meter {
    pub(super) fn new() -> Meter {
        Meter { on: AtomicBool::new(false), times: Mutex::default() }
    }

    /// Turns the meter on, from zero, or off.
    pub fn switch(&self, on: bool) {
        if on {
            *self.lock() = Times::default();
        }
        self.on.store(on, Relaxed);
    }

    /// Time spent in a class of operations since the meter was turned on. Waits for the operations issued so far.
    pub fn spent(&self, operation: OpClass) -> Duration {
        let mut times = self.lock();
        times.settle();
        times.spent[operation as usize]
    }

    pub(super) fn is_on(&self) -> bool {
        self.on.load(Relaxed)
    }

    pub(super) fn add(&self, operation: OpClass, start: Event, end: Event) {
        let mut times = self.lock();
        match end.duration_now(&start) {
            Some(time) => times.spent[operation as usize] += time,
            None => times.pending.push((operation, start, end)),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
