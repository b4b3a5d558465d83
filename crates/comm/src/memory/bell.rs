//! Sleeping until a peer has done something, without losing a wake-up.
//! Says only "look again": what changed, the sleeper finds out itself.
//!
//! The ringer first makes its change, then rings; the sleeper first says that it is about to sleep,
//! then looks once more. A fence on both sides makes sure that one of them sees the other (Dekker's
//! argument), so a ring costs one load while nobody sleeps. `loom_models` walks the interleavings.

use crate::memory::sync::{AtomicU32, Ordering, fence};
use std::time::Duration;

#[derive(Debug)]
#[repr(C)]
pub(crate) struct Bell {
    /// Counts the rings; the futex word.
    rings: AtomicU32,
    /// Whether somebody sleeps or is about to.
    asleep: AtomicU32,
    #[cfg(loom)]
    bed: (loom::sync::Mutex<()>, loom::sync::Condvar),
}

impl Bell {
    #[cfg(all(loom, test))]
    pub(crate) fn new() -> Bell {
        Bell {
            rings: AtomicU32::new(0),
            asleep: AtomicU32::new(0),
            #[cfg(loom)]
            bed: (loom::sync::Mutex::new(()), loom::sync::Condvar::new()),
        }
    }

    /// Wakes the sleeper, if there is one. Call it after the change it may be waiting for.
    #[inline]
    pub(crate) fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) != 0 {
            self.rings.fetch_add(1, Ordering::Release);
            self.wake();
        }
    }

    /// Sleeps until the bell rings or `limit` is over, unless `ready` holds already.
    /// One sleeper at a time.
    pub(crate) fn sleep_unless(&self, ready: impl FnOnce() -> bool, limit: Duration) {
        let seen = self.rings.load(Ordering::Acquire);
        self.asleep.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !ready() {
            self.wait(seen, limit);
        }
        self.asleep.store(0, Ordering::Relaxed);
    }

    #[cfg(not(loom))]
    fn wake(&self) {
        crate::memory::sync::futex_wake(&self.rings);
    }

    #[cfg(not(loom))]
    fn wait(&self, seen: u32, limit: Duration) {
        crate::memory::sync::futex_wait(&self.rings, seen, limit);
    }

    #[cfg(loom)]
    fn wake(&self) {
        let _bed = self.bed.0.lock().unwrap();
        self.bed.1.notify_all();
    }

    /// Like the kernel's: compares and lies down in one step. Has no limit, so that loom reports a
    /// lost wake-up as a deadlock.
    #[cfg(loom)]
    fn wait(&self, seen: u32, _limit: Duration) {
        let mut bed = self.bed.0.lock().unwrap();
        while self.rings.load(Ordering::Acquire) == seen {
            bed = self.bed.1.wait(bed).unwrap();
        }
    }
}
