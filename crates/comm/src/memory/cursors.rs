//! Protocol of a ring buffer with one writer and one reader: which bytes each may access, and when.
//! Accesses no bytes itself: see `channel`.

use crate::memory::sync::{AtomicU64, Ordering};
use std::ops::Range;

/// Pieces start at multiples of this, so any element type can be read in place.
pub(crate) const GRAIN: usize = 64;

/// The two cursors, in bytes since the start; each is written by one side.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Cursors {
    written: AtomicU64,
    _padding: [u8; 120],
    read: AtomicU64,
}

impl Cursors {
    #[cfg(all(loom, test))]
    pub(crate) fn new() -> Cursors {
        Cursors { written: AtomicU64::new(0), _padding: [0; 120], read: AtomicU64::new(0) }
    }
}

/// Position of the writer in a ring of `capacity` bytes, a multiple of the grain.
#[derive(Debug)]
pub(crate) struct WriteEnd {
    pub capacity: usize,
    at: u64,
}

impl WriteEnd {
    pub(crate) fn new(capacity: usize) -> WriteEnd {
        WriteEnd { capacity, at: 0 }
    }

    /// The bytes of the ring to write next, at most `most`; empty if there is no room.
    pub(crate) fn next(&self, cursors: &Cursors, most: usize) -> Range<usize> {
        let offset = (self.at % self.capacity as u64) as usize;
        let n = most.min(self.room(cursors)).min(self.capacity - offset);
        offset..offset + n
    }

    /// Publishes the next `n` bytes to the reader.
    pub(crate) fn publish(&mut self, cursors: &Cursors, n: usize) {
        self.at += n as u64;
        cursors.written.store(self.at, Ordering::Release);
    }

    /// Ends a message: the next one starts at a multiple of the grain.
    pub(crate) fn pad(&mut self, cursors: &Cursors) {
        self.at = self.at.next_multiple_of(GRAIN as u64);
        cursors.written.store(self.at, Ordering::Release);
    }

    pub(crate) fn room(&self, cursors: &Cursors) -> usize {
        // Acquire: the reader's reads must happen before we overwrite the bytes.
        let end = cursors.read.load(Ordering::Acquire) + self.capacity as u64;
        // Padding may be past the end while the reader has not yet skipped its own.
        end.saturating_sub(self.at) as usize
    }
}

/// Position of the reader in a ring of `capacity` bytes.
#[derive(Debug)]
pub(crate) struct ReadEnd {
    pub capacity: usize,
    at: u64,
}

impl ReadEnd {
    pub(crate) fn new(capacity: usize) -> ReadEnd {
        ReadEnd { capacity, at: 0 }
    }

    /// The bytes of the ring to read next, of a message with `most` bytes left; empty if there are none.
    /// Pieces that do not end the message are whole grains.
    pub(crate) fn next(&self, cursors: &Cursors, most: usize) -> Range<usize> {
        let offset = (self.at % self.capacity as u64) as usize;
        let mut n = self.available(cursors).min(most).min(self.capacity - offset);
        if n < most {
            n -= n % GRAIN;
        }
        offset..offset + n
    }

    /// Releases the next `n` bytes to the writer.
    pub(crate) fn release(&mut self, cursors: &Cursors, n: usize) {
        self.at += n as u64;
        cursors.read.store(self.at, Ordering::Release);
    }

    /// Whether `next` would return bytes, if `most` are wanted.
    pub(crate) fn has_some(&self, cursors: &Cursors, most: usize) -> bool {
        self.available(cursors) >= GRAIN.min(most)
    }

    /// Ends a message: skips to the next multiple of the grain.
    pub(crate) fn skip_padding(&mut self, cursors: &Cursors) {
        self.at = self.at.next_multiple_of(GRAIN as u64);
        cursors.read.store(self.at, Ordering::Release);
    }

    fn available(&self, cursors: &Cursors) -> usize {
        // The reader may have skipped padding that the writer has not published yet.
        cursors.written.load(Ordering::Acquire).saturating_sub(self.at) as usize
    }
}
