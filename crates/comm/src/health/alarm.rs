//! The record of the failure that broke a world, in shared memory: whoever sees it raised sees all of
//! it, and everybody sees the same one.

use crate::call::error::{Cause, Failure};
use crate::memory::sync::{AtomicU8, AtomicU32, Ordering, pause};
use std::time::{Duration, Instant};

/// Longest failure text; a longer one is cut. A model walks through every byte, so it gets few.
pub(crate) const TEXT: usize = if cfg!(loom) { 2 } else { 1200 };

/// Failures that can be written down at the same time. The first that is complete stands, so a rank
/// that is killed while it writes holds nobody up.
const RECORDS: usize = if cfg!(loom) { 2 } else { 8 };

#[repr(C)]
pub(crate) struct Alarm {
    /// Records given out.
    claimed: AtomicU32,
    /// The record that stands, plus one.
    raised: AtomicU32,
    records: [Record; RECORDS],
}

#[repr(C)]
struct Record {
    guilty: AtomicU32,
    cause: AtomicU32,
    len: AtomicU32,
    text: [AtomicU8; TEXT],
}

impl Alarm {
    #[cfg(all(loom, test))]
    pub(crate) fn new() -> Alarm {
        let zero = || AtomicU32::new(0);
        let record = |()| Record {
            guilty: zero(),
            cause: zero(),
            len: zero(),
            text: [0; TEXT].map(AtomicU8::new),
        };
        Alarm { claimed: zero(), raised: zero(), records: [(); RECORDS].map(record) }
    }

    /// The first failure stands; the one that stands comes back.
    pub(crate) fn raise(&self, failure: &Failure) -> Failure {
        if let Some(standing) = self.standing() {
            return standing;
        }
        let place = self.claim();
        if let Some(record) = self.records.get(place) {
            record.write(failure);
            let number = place as u32 + 1;
            let _ = self.raised.compare_exchange(0, number, Ordering::AcqRel, Ordering::Acquire);
        }
        // With all records taken, one of their writers is about to be done.
        self.await_standing(Duration::from_millis(100)).unwrap_or_else(|| failure.clone())
    }

    /// Takes a record to write into. Who dies now leaves it empty, and it is never raised.
    pub(crate) fn claim(&self) -> usize {
        self.claimed.fetch_add(1, Ordering::AcqRel) as usize
    }

    #[inline]
    pub(crate) fn raised(&self) -> bool {
        self.raised.load(Ordering::Acquire) != 0
    }

    pub(crate) fn standing(&self) -> Option<Failure> {
        let place = self.raised.load(Ordering::Acquire).checked_sub(1)?;
        self.records.get(place as usize).map(Record::read)
    }

    /// The failure that stands, if it is known within `limit`.
    pub(crate) fn await_standing(&self, limit: Duration) -> Option<Failure> {
        let until = Instant::now() + limit;
        loop {
            let standing = self.standing();
            if standing.is_some() || Instant::now() >= until {
                return standing;
            }
            pause();
        }
    }
}

impl Record {
    fn write(&self, failure: &Failure) {
        let cut = (0..=TEXT.min(failure.text.len()))
            .rev()
            .find(|at| failure.text.is_char_boundary(*at))
            .unwrap_or(0);
        for (to, from) in self.text.iter().zip(&failure.text.as_bytes()[..cut]) {
            to.store(*from, Ordering::Relaxed);
        }
        self.len.store(cut as u32, Ordering::Relaxed);
        self.guilty.store(failure.guilty as u32, Ordering::Relaxed);
        self.cause.store(failure.cause as u32, Ordering::Relaxed);
    }

    fn read(&self) -> Failure {
        let len = (self.len.load(Ordering::Relaxed) as usize).min(TEXT);
        let text: Vec<u8> = self.text[..len].iter().map(|b| b.load(Ordering::Relaxed)).collect();
        Failure {
            guilty: self.guilty.load(Ordering::Relaxed) as usize,
            cause: Cause::from_code(self.cause.load(Ordering::Relaxed)).unwrap_or(Cause::Failed),
            text: String::from_utf8_lossy(&text).into_owned(),
        }
    }
}
