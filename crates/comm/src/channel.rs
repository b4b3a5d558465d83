//! A one-way pipe of bytes between two ranks of a host: one writer, one reader, a ring in shared
//! memory. Knows nothing of messages; keeps every piece on a 64-byte boundary so that numbers can
//! be read in place.

use crate::sync::{AtomicU64, Ordering};

/// Pieces start at multiples of this, so any element type can be read where it lies.
pub(crate) const GRAIN: usize = 64;
/// Bytes that the ring of one channel holds.
pub(crate) const CAPACITY: usize = 128 << 10;
/// Largest piece that is published at once, so that the reader works while the writer writes on.
const PIECE: usize = 32 << 10;

/// The two cursors, in bytes since the beginning; each has one writer.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Cursors {
    written: AtomicU64,
    _apart: [u8; 120],
    read: AtomicU64,
}

impl Cursors {
    #[cfg(loom)]
    pub(crate) fn new() -> Cursors {
        Cursors { written: AtomicU64::new(0), _apart: [0; 120], read: AtomicU64::new(0) }
    }

    /// How far the writer may go: everything before this has been read.
    pub(crate) fn room(&self, capacity: u64) -> u64 {
        // Acquire: what the reader read must be read before it is overwritten.
        self.read.load(Ordering::Acquire) + capacity
    }

    /// How far the reader may go.
    pub(crate) fn available(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    pub(crate) fn publish(&self, written: u64) {
        self.written.store(written, Ordering::Release);
    }

    pub(crate) fn release(&self, read: u64) {
        self.read.store(read, Ordering::Release);
    }
}

/// Bytes of shared memory that one channel takes.
pub(crate) const CHANNEL_BYTES: usize = size_of::<Cursors>() + CAPACITY;

/// The writing end.
#[derive(Debug)]
pub(crate) struct Writer {
    cursors: *const Cursors,
    ring: *mut u8,
    at: u64,
}

/// The reading end.
#[derive(Debug)]
pub(crate) struct Reader {
    cursors: *const Cursors,
    ring: *const u8,
    at: u64,
}

// SAFETY: an end has one owner at a time, and what it points to is shared memory under the protocol
// of the cursors.
unsafe impl Send for Writer {}
// SAFETY: as above.
unsafe impl Send for Reader {}

impl Writer {
    /// # Safety
    /// `base` must point to `CHANNEL_BYTES` of mapped shared memory, zero when the channel began,
    /// that outlive this value, and there must be no other writer.
    pub(crate) unsafe fn new(base: *mut u8) -> Writer {
        // SAFETY: inside the channel's memory.
        let ring = unsafe { base.add(size_of::<Cursors>()) };
        Writer { cursors: base.cast(), ring, at: 0 }
    }

    fn cursors(&self) -> &Cursors {
        // SAFETY: mapped for as long as we live; all fields are atomics.
        unsafe { &*self.cursors }
    }

    /// Writes as much of `bytes` as there is room for, and says how much that was.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> usize {
        let mut done = 0;
        while done < bytes.len() {
            let offset = (self.at % CAPACITY as u64) as usize;
            let room = (self.cursors().room(CAPACITY as u64) - self.at) as usize;
            let n = (bytes.len() - done).min(room).min(CAPACITY - offset).min(PIECE);
            if n == 0 {
                break;
            }
            // SAFETY: the reader is done with these bytes of the ring and will not look at them
            // before they are published.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes[done..].as_ptr(), self.ring.add(offset), n);
            }
            done += n;
            self.at += n as u64;
            self.cursors().publish(self.at);
        }
        done
    }

    pub(crate) fn has_room(&self) -> bool {
        self.cursors().room(CAPACITY as u64) > self.at
    }

    /// Ends a message: the next one starts at a grain.
    pub(crate) fn pad(&mut self) {
        self.at = self.at.next_multiple_of(GRAIN as u64);
        self.cursors().publish(self.at);
    }
}

impl Reader {
    /// # Safety
    /// As for `Writer::new`, and there must be no other reader.
    pub(crate) unsafe fn new(base: *mut u8) -> Reader {
        // SAFETY: inside the channel's memory.
        let ring = unsafe { base.add(size_of::<Cursors>()) };
        Reader { cursors: base.cast(), ring, at: 0 }
    }

    fn cursors(&self) -> &Cursors {
        // SAFETY: mapped for as long as we live; all fields are atomics.
        unsafe { &*self.cursors }
    }

    /// Hands out one piece of at most `most` bytes where it lies, if one is there; says how long it
    /// was. Pieces that do not end the message are whole grains.
    pub(crate) fn pull(&mut self, most: usize, take: impl FnOnce(&[u8])) -> usize {
        let offset = (self.at % CAPACITY as u64) as usize;
        // The reader may have skipped padding that the writer has not published yet.
        let there = self.cursors().available().saturating_sub(self.at) as usize;
        let mut n = there.min(most).min(CAPACITY - offset);
        if n < most {
            n -= n % GRAIN;
        }
        if n == 0 {
            return 0;
        }
        // SAFETY: these bytes are published and the writer leaves them alone until they are released.
        take(unsafe { std::slice::from_raw_parts(self.ring.add(offset), n) });
        self.at += n as u64;
        self.cursors().release(self.at);
        n
    }

    /// Whether `pull` would give something, if `most` bytes are wanted.
    pub(crate) fn has_some(&self, most: usize) -> bool {
        self.cursors().available().saturating_sub(self.at) >= GRAIN.min(most) as u64
    }

    /// Ends a message: skips to the next grain.
    pub(crate) fn skip_padding(&mut self) {
        self.at = self.at.next_multiple_of(GRAIN as u64);
        self.cursors().release(self.at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::Segment;

    /// Messages of many lengths through one ring, with the reader on another thread.
    #[test]
    fn what_is_pushed_is_pulled() {
        let (segment, _offer) = Segment::create(CHANNEL_BYTES).unwrap();
        let lengths: Vec<usize> = (0..200).map(|i| (i * 7919) % 300_000).collect();
        std::thread::scope(|s| {
            s.spawn(|| {
                // SAFETY: the segment outlives the scope; this is the only writer.
                let mut writer = unsafe { Writer::new(segment.at(0)) };
                for (i, &len) in lengths.iter().enumerate() {
                    let message: Vec<u8> = (0..len).map(|j| (i + j) as u8).collect();
                    let mut done = 0;
                    while done < len {
                        done += writer.push(&message[done..]);
                    }
                    writer.pad();
                }
            });
            // SAFETY: as above, the only reader.
            let mut reader = unsafe { Reader::new(segment.at(0)) };
            for (i, &len) in lengths.iter().enumerate() {
                let mut got = 0;
                while got < len {
                    got += reader.pull(len - got, |piece| {
                        assert_eq!(piece.as_ptr() as usize % GRAIN, 0);
                        for (j, b) in piece.iter().enumerate() {
                            assert_eq!(*b, (i + got + j) as u8);
                        }
                    });
                }
                reader.skip_padding();
            }
        });
    }
}
