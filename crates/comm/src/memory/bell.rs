//! A bell: an event count on a futex. A peer rings it after a change, and one thread may sleep on it
//! without losing a wake-up. It only says "check again"; the sleeper finds out what changed.
//!
//! The ringer first makes its change, then rings; the sleeper first announces that it is about to sleep,
//! then checks once more. A fence on both sides ensures that one of them sees the other (Dekker's
//! argument), so a ring costs one load while nobody sleeps. `loom_models` checks the interleavings.

use crate::memory::sync::{AtomicU32, Ordering, fence};
use std::time::Duration;

#[derive(Debug)]
#[repr(C)]
pub(crate) struct Bell {
    /// Number of rings; the futex word.
    rings: AtomicU32,
    /// Whether a thread sleeps or is about to.
    asleep: AtomicU32,
    #[cfg(loom)]
    condvar: (loom::sync::Mutex<()>, loom::sync::Condvar),
}

impl Bell {
    #[cfg(all(loom, test))]
    pub(crate) fn new() -> Bell {
        Bell {
            rings: AtomicU32::new(0),
            asleep: AtomicU32::new(0),
            #[cfg(loom)]
            condvar: (loom::sync::Mutex::new(()), loom::sync::Condvar::new()),
        }
    }

    /// Wakes the sleeper, if there is one. Call it after the change.
    #[inline]
    pub(crate) fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) != 0 {
            self.rings.fetch_add(1, Ordering::Release);
            self.wake();
        }
    }

    /// Sleeps until the bell rings or `limit` has passed, unless `ready` already holds.
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
        let _condvar = self.condvar.0.lock().unwrap();
        self.condvar.1.notify_all();
    }

    /// Compares and sleeps atomically, like the kernel. Has no limit, so that loom reports a lost wake-up
    /// as a deadlock.
    #[cfg(loom)]
    fn wait(&self, seen: u32, _limit: Duration) {
        let mut condvar = self.condvar.0.lock().unwrap();
        while self.rings.load(Ordering::Acquire) == seen {
            condvar = self.condvar.1.wait(condvar).unwrap();
        }
    }
}
