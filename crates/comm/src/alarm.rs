//! The record of the one failure that broke a world, in shared memory. Written once, by whoever
//! claims it first; whoever sees it raised sees all of it.

use crate::error::{Cause, Failure};
use crate::sync::{AtomicU8, AtomicU32, Ordering, pause};

/// Longest failure text; a longer one is cut. A model walks through every byte, so it gets few.
pub(crate) const TEXT: usize = if cfg!(loom) { 2 } else { 1200 };

#[repr(C)]
pub(crate) struct Alarm {
    claimed: AtomicU32,
    raised: AtomicU32,
    guilty: AtomicU32,
    cause: AtomicU32,
    len: AtomicU32,
    text: [AtomicU8; TEXT],
}

impl Alarm {
    #[cfg(all(loom, test))]
    pub(crate) fn new() -> Alarm {
        Alarm {
            claimed: AtomicU32::new(0),
            raised: AtomicU32::new(0),
            guilty: AtomicU32::new(0),
            cause: AtomicU32::new(0),
            len: AtomicU32::new(0),
            text: [0; TEXT].map(AtomicU8::new),
        }
    }

    /// The first failure stands; the one that stands comes back.
    pub(crate) fn raise(&self, failure: &Failure) -> Failure {
        let first =
            self.claimed.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if first {
            self.write(failure);
            return failure.clone();
        }
        // Another rank is writing it, a matter of microseconds, unless it was killed at just that
        // moment: then our own word has to do.
        for _ in 0..1000 {
            if let Some(standing) = self.standing() {
                return standing;
            }
            pause();
        }
        failure.clone()
    }

    fn write(&self, failure: &Failure) {
        let cut = failure.text.floor_char_boundary(TEXT);
        for (to, from) in self.text.iter().zip(&failure.text.as_bytes()[..cut]) {
            to.store(*from, Ordering::Relaxed);
        }
        self.len.store(cut as u32, Ordering::Relaxed);
        self.guilty.store(failure.guilty as u32, Ordering::Relaxed);
        self.cause.store(failure.cause as u32, Ordering::Relaxed);
        self.raised.store(1, Ordering::Release);
    }

    #[inline]
    pub(crate) fn raised(&self) -> bool {
        self.raised.load(Ordering::Acquire) != 0
    }

    pub(crate) fn standing(&self) -> Option<Failure> {
        if !self.raised() {
            return None;
        }
        let len = (self.len.load(Ordering::Relaxed) as usize).min(TEXT);
        let text: Vec<u8> = self.text[..len].iter().map(|b| b.load(Ordering::Relaxed)).collect();
        Some(Failure {
            guilty: self.guilty.load(Ordering::Relaxed) as usize,
            cause: Cause::from_code(self.cause.load(Ordering::Relaxed)).unwrap_or(Cause::Failed),
            text: String::from_utf8_lossy(&text).into_owned(),
        })
    }
}
