//! Time per class of operation. While it is off, the meter costs one load per operation.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use lockstep_types::OpClass;
use lockstep_types::trace::{SpanKind, Tracer};

use super::Event;

/// Time spent per class of operation, measured while the meter is on.
pub struct Meter {
    on: AtomicBool,
    times: Mutex<Times>,
    tracer: OnceLock<Tracer>,
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
        Meter { on: AtomicBool::new(false), times: Mutex::default(), tracer: OnceLock::new() }
    }

    /// Turns the meter on, from zero, or off.
    pub fn switch(&self, on: bool) {
        if on {
            *self.lock() = Times::default();
        }
        self.on.store(on, Relaxed);
    }

    /// Records operations as spans of `tracer` while both are on. The first call counts. Operations of a GPU, which
    /// end after the host has issued them, are not recorded.
    pub fn trace(&self, tracer: &Tracer) {
        self.tracer.get_or_init(|| tracer.clone());
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
        let Some(time) = end.duration_now(&start) else {
            return self.lock().pending.push((operation, start, end));
        };
        self.lock().spent[operation as usize] += time;
        if let Some(tracer) = self.tracer.get() {
            tracer.ended(SpanKind::Kernel, operation.name(), time);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
