//! A one-way byte channel between two ranks of a host: a ring buffer in shared memory with one writer and
//! one reader. Knows nothing about messages; keeps every piece on a 64-byte boundary so that numbers can
//! be read in place. `cursors` defines who may access which bytes.

pub(crate) use crate::memory::cursors::GRAIN;
use crate::memory::cursors::{Cursors, ReadEnd, WriteEnd};

/// Size of the ring buffer in bytes.
pub(crate) const CAPACITY: usize = 128 << 10;
/// Largest piece that is published at once, so that reader and writer overlap.
const PIECE: usize = 32 << 10;

/// Bytes of shared memory of one channel.
pub(crate) const CHANNEL_BYTES: usize = size_of::<Cursors>() + CAPACITY;

/// The writing end.
#[derive(Debug)]
pub(crate) struct Writer {
    cursors: *const Cursors,
    ring: *mut u8,
    end: WriteEnd,
}

/// The reading end.
#[derive(Debug)]
pub(crate) struct Reader {
    cursors: *const Cursors,
    ring: *const u8,
    end: ReadEnd,
}

// SAFETY: an end has one owner at a time, and the memory it points to is accessed under the protocol of
// the cursors.
unsafe impl Send for Writer {}
// SAFETY: as above.
unsafe impl Send for Reader {}

impl Writer {
    /// # Safety
    /// `base` must point to `CHANNEL_BYTES` of mapped shared memory, initially zero, that outlive this
    /// value, and there must be no other writer.
    pub(crate) unsafe fn new(base: *mut u8) -> Writer {
        // SAFETY: inside the channel's memory.
        let ring = unsafe { base.add(size_of::<Cursors>()) };
        Writer { cursors: base.cast(), ring, end: WriteEnd::new(CAPACITY) }
    }

    /// Writes as much of `bytes` as fits and returns its length.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> usize {
        // SAFETY: mapped for as long as we live; all fields are atomics.
        let cursors = unsafe { &*self.cursors };
        let mut done = 0;
        while done < bytes.len() {
            let place = self.end.next(cursors, (bytes.len() - done).min(PIECE));
            if place.is_empty() {
                break;
            }
            let piece = &bytes[done..done + place.len()];
            // SAFETY: the reader has released these bytes of the ring and will not read them before
            // they are published.
            unsafe {
                let to = self.ring.add(place.start);
                std::ptr::copy_nonoverlapping(piece.as_ptr(), to, piece.len());
            }
            done += piece.len();
            self.end.publish(cursors, piece.len());
        }
        done
    }

    pub(crate) fn has_room(&self) -> bool {
        // SAFETY: as in `push`.
        self.end.room(unsafe { &*self.cursors }) > 0
    }

    /// Ends a message: the next one starts at a multiple of the grain.
    pub(crate) fn pad(&mut self) {
        // SAFETY: as in `push`.
        self.end.pad(unsafe { &*self.cursors });
    }
}

impl Reader {
    /// # Safety
    /// As for `Writer::new`, and there must be no other reader.
    pub(crate) unsafe fn new(base: *mut u8) -> Reader {
        // SAFETY: inside the channel's memory.
        let ring = unsafe { base.add(size_of::<Cursors>()) };
        Reader { cursors: base.cast(), ring, end: ReadEnd::new(CAPACITY) }
    }

    /// Passes one available piece of at most `most` bytes to `take`, in place; returns its length. Pieces
    /// that do not end the message are whole grains.
    pub(crate) fn pull(&mut self, most: usize, take: impl FnOnce(&[u8])) -> usize {
        // SAFETY: mapped for as long as we live; all fields are atomics.
        let cursors = unsafe { &*self.cursors };
        let place = self.end.next(cursors, most);
        if place.is_empty() {
            return 0;
        }
        // SAFETY: these bytes are published, and the writer does not access them until they are released.
        take(unsafe { std::slice::from_raw_parts(self.ring.add(place.start), place.len()) });
        self.end.release(cursors, place.len());
        place.len()
    }

    /// Whether `pull` would pass a piece, if `most` bytes are wanted.
    pub(crate) fn has_some(&self, most: usize) -> bool {
        // SAFETY: as in `pull`.
        self.end.has_some(unsafe { &*self.cursors }, most)
    }

    /// Ends a message: skips to the next multiple of the grain.
    pub(crate) fn skip_padding(&mut self) {
        // SAFETY: as in `pull`.
        self.end.skip_padding(unsafe { &*self.cursors });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::segment::Segment;

    /// Messages of many lengths through one ring, with the reader on another thread.
    #[test]
    fn pushed_bytes_are_pulled() {
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
