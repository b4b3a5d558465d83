//! The failure that broke a world, in shared memory. A reader that sees the alarm sees the complete
//! record, and all readers see the same one.

use crate::call::error::{Cause, Failure};
use crate::memory::sync::{AtomicU8, AtomicU32, Ordering, pause};
use std::time::{Duration, Instant};

/// Maximum length of the text; longer texts are truncated. Loom explores every byte, so it gets few.
pub(crate) const TEXT: usize = if cfg!(loom) { 2 } else { 1200 };

/// Number of failures that can be written at the same time. The first complete one wins, so a rank that
/// is killed while writing blocks nobody.
const RECORDS: usize = if cfg!(loom) { 2 } else { 8 };

#[repr(C)]
pub(crate) struct Alarm {
    /// Records claimed.
    claimed: AtomicU32,
    /// Index of the winning record plus one, or zero.
    raised: AtomicU32,
    records: [Record; RECORDS],
}

#[repr(C)]
struct Record {
    culprit: AtomicU32,
    cause: AtomicU32,
    len: AtomicU32,
    text: [AtomicU8; TEXT],
}

impl Alarm {
    #[cfg(all(loom, test))]
    pub(crate) fn new() -> Alarm {
        let zero = || AtomicU32::new(0);
        let record = |()| Record {
            culprit: zero(),
            cause: zero(),
            len: zero(),
            text: [0; TEXT].map(AtomicU8::new),
        };
        Alarm { claimed: zero(), raised: zero(), records: [(); RECORDS].map(record) }
    }

    /// Raises a failure unless there is one already; returns the failure that won.
    pub(crate) fn raise(&self, failure: &Failure) -> Failure {
        if let Some(failure) = self.failure() {
            return failure;
        }
        let place = self.claim();
        if let Some(record) = self.records.get(place) {
            record.write(failure);
            let number = place as u32 + 1;
            let _ = self.raised.compare_exchange(0, number, Ordering::AcqRel, Ordering::Acquire);
        }
        // If all records are claimed, one of their writers is about to finish.
        self.wait_for_failure(Duration::from_millis(100)).unwrap_or_else(|| failure.clone())
    }

    /// Claims a record to write. A rank that dies before writing it leaves it unused.
    pub(crate) fn claim(&self) -> usize {
        self.claimed.fetch_add(1, Ordering::AcqRel) as usize
    }

    #[inline]
    pub(crate) fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire) != 0
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        let place = self.raised.load(Ordering::Acquire).checked_sub(1)?;
        self.records.get(place as usize).map(Record::read)
    }

    /// Waits up to `limit` for the failure.
    pub(crate) fn wait_for_failure(&self, limit: Duration) -> Option<Failure> {
        let until = Instant::now() + limit;
        loop {
            let failure = self.failure();
            if failure.is_some() || Instant::now() >= until {
                return failure;
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
        self.culprit.store(failure.culprit as u32, Ordering::Relaxed);
        self.cause.store(failure.cause as u32, Ordering::Relaxed);
    }

    fn read(&self) -> Failure {
        let len = (self.len.load(Ordering::Relaxed) as usize).min(TEXT);
        let text: Vec<u8> = self.text[..len].iter().map(|b| b.load(Ordering::Relaxed)).collect();
        Failure {
            culprit: self.culprit.load(Ordering::Relaxed) as usize,
            cause: Cause::from_code(self.cause.load(Ordering::Relaxed)).unwrap_or(Cause::Failed),
            text: String::from_utf8_lossy(&text).into_owned(),
        }
    }
}
