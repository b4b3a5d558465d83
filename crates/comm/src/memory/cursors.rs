//! The rules of a ring with one writer and one reader: which bytes each may touch, and when they
//! change hands. Touches no bytes itself: see `channel`.

use crate::memory::sync::{AtomicU64, Ordering};
use std::ops::Range;

/// Pieces start at multiples of this, so any element type can be read where it lies.
pub(crate) const GRAIN: usize = 64;

/// The two cursors, in bytes since the beginning; each has one writer.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Cursors {
    written: AtomicU64,
    _apart: [u8; 120],
    read: AtomicU64,
}

impl Cursors {
    #[cfg(all(loom, test))]
    pub(crate) fn new() -> Cursors {
        Cursors { written: AtomicU64::new(0), _apart: [0; 120], read: AtomicU64::new(0) }
    }
}

/// Where the writer is in a ring of `capacity` bytes, a multiple of the grain.
#[derive(Debug)]
pub(crate) struct WriteEnd {
    pub capacity: usize,
    at: u64,
}

impl WriteEnd {
    pub(crate) fn new(capacity: usize) -> WriteEnd {
        WriteEnd { capacity, at: 0 }
    }

    /// The bytes of the ring to be written next, at most `most`; empty if there is no room.
    pub(crate) fn next(&self, cursors: &Cursors, most: usize) -> Range<usize> {
        let offset = (self.at % self.capacity as u64) as usize;
        let n = most.min(self.room(cursors)).min(self.capacity - offset);
        offset..offset + n
    }

    /// Hands the next `n` bytes over to the reader.
    pub(crate) fn publish(&mut self, cursors: &Cursors, n: usize) {
        self.at += n as u64;
        cursors.written.store(self.at, Ordering::Release);
    }

    /// Ends a message: the next one starts at a grain.
    pub(crate) fn pad(&mut self, cursors: &Cursors) {
        self.at = self.at.next_multiple_of(GRAIN as u64);
        cursors.written.store(self.at, Ordering::Release);
    }

    pub(crate) fn room(&self, cursors: &Cursors) -> usize {
        // Acquire: what the reader read must be read before it is overwritten.
        let end = cursors.read.load(Ordering::Acquire) + self.capacity as u64;
        // Padding may lie past the end, while the reader has not yet skipped its own.
        end.saturating_sub(self.at) as usize
    }
}

/// Where the reader is in a ring of `capacity` bytes.
#[derive(Debug)]
pub(crate) struct ReadEnd {
    pub capacity: usize,
    at: u64,
}

impl ReadEnd {
    pub(crate) fn new(capacity: usize) -> ReadEnd {
        ReadEnd { capacity, at: 0 }
    }

    /// The bytes of the ring to be read next, of a message that has `most` left; empty if there are
    /// none. Pieces that do not end the message are whole grains.
    pub(crate) fn next(&self, cursors: &Cursors, most: usize) -> Range<usize> {
        let offset = (self.at % self.capacity as u64) as usize;
        let mut n = self.there(cursors).min(most).min(self.capacity - offset);
        if n < most {
            n -= n % GRAIN;
        }
        offset..offset + n
    }

    /// Gives the next `n` bytes back to the writer.
    pub(crate) fn release(&mut self, cursors: &Cursors, n: usize) {
        self.at += n as u64;
        cursors.read.store(self.at, Ordering::Release);
    }

    /// Whether `next` would give something, if `most` bytes are wanted.
    pub(crate) fn has_some(&self, cursors: &Cursors, most: usize) -> bool {
        self.there(cursors) >= GRAIN.min(most)
    }

    /// Ends a message: skips to the next grain.
    pub(crate) fn skip_padding(&mut self, cursors: &Cursors) {
        self.at = self.at.next_multiple_of(GRAIN as u64);
        cursors.read.store(self.at, Ordering::Release);
    }

    fn there(&self, cursors: &Cursors) -> usize {
        // The reader may have skipped padding that the writer has not published yet.
        cursors.written.load(Ordering::Acquire).saturating_sub(self.at) as usize
    }
}
