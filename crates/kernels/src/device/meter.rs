//! Time per class of operation. While it is off, the meter costs one load per operation.

use lockstep_types::OpClass;
use lockstep_types::trace::{SpanKind, Tracer};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Time spent per class of operation, measured while the meter is on.
pub struct Meter {
    on: AtomicBool,
    nanos: [AtomicU64; OpClass::ALL.len()],
    tracer: OnceLock<Tracer>,
}

impl Meter {
    pub(super) fn new() -> Meter {
        Meter { on: AtomicBool::new(false), nanos: Default::default(), tracer: OnceLock::new() }
    }

    /// Turns the meter on, from zero, or off.
    pub fn switch(&self, on: bool) {
        if on {
            self.nanos.iter().for_each(|nanos| nanos.store(0, Relaxed));
        }
        self.on.store(on, Relaxed);
    }

    /// Records operations as spans of `tracer` while both are on. The first call counts.
    pub fn trace(&self, tracer: &Tracer) {
        self.tracer.get_or_init(|| tracer.clone());
    }

    /// Time spent in a class of operations since the meter was turned on.
    pub fn spent(&self, operation: OpClass) -> Duration {
        Duration::from_nanos(self.nanos[operation as usize].load(Relaxed))
    }

    pub(super) fn is_on(&self) -> bool {
        self.on.load(Relaxed)
    }

    pub(super) fn add(&self, operation: OpClass, time: Duration) {
        self.nanos[operation as usize].fetch_add(time.as_nanos() as u64, Relaxed);
        if let Some(tracer) = self.tracer.get() {
            tracer.ended(SpanKind::Kernel, operation.name(), time);
        }
    }
}
