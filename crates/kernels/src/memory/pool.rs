//! Where tensors live: large chunks of memory, cut to size and joined again when pieces come back, so that
//! what was an activation in the forward pass is a gradient in the backward pass. Once chunks and lists have
//! grown to what a step needs, nothing is allocated.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::sync::Mutex;

use super::{Memory, Tag};

/// Pieces start on cache-line pairs, so that no two tensors share one.
const ALIGN: usize = 128;

/// The least that is asked of the system at once. Pages that nobody touches cost nothing.
const CHUNK: usize = 64 << 20;

/// The memory of a device.
pub struct Pool(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    chunks: Vec<Chunk>,
    /// Free pieces in the order of their addresses; neighbours of one chunk are always joined.
    free: Vec<Piece>,
    /// Who holds what, and how many handles there are to it.
    held: Vec<Held>,
    /// Entries of `held` that nobody uses.
    vacant: Vec<u32>,
    memory: Memory,
}

struct Chunk {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: a chunk is plain memory that the pool alone hands out; moving the pool moves the right to it.
unsafe impl Send for Chunk {}

#[derive(Clone, Copy)]
struct Piece {
    start: usize,
    bytes: usize,
}

#[derive(Clone, Copy)]
struct Held {
    piece: Piece,
    asked: usize,
    tag: Tag,
    handles: usize,
}

impl Pool {
    pub(crate) fn new() -> Pool {
        Pool(Mutex::default())
    }

    /// What is held now, and was at most.
    pub fn memory(&self) -> Memory {
        self.lock().memory
    }

    /// Lets the peaks start again from what is held now.
    pub fn reset_peaks(&self) {
        let memory = &mut self.lock().memory;
        memory
            .by_tag
            .iter_mut()
            .chain([&mut memory.total])
            .for_each(|usage| usage.peak = usage.now);
    }

    /// A piece of `bytes` with whatever was last written there: its holder's number and its address.
    pub(super) fn take(&self, bytes: usize, tag: Tag) -> (u32, *mut u8) {
        let mut inner = self.lock();
        let piece = inner.cut(bytes.max(1).next_multiple_of(ALIGN));
        inner.memory.take(tag, bytes);
        let held = Held { piece, asked: bytes, tag, handles: 1 };
        let holder = match inner.vacant.pop() {
            Some(holder) => {
                inner.held[holder as usize] = held;
                holder
            }
            None => {
                inner.held.push(held);
                // The day every holder leaves, all of them are on this list.
                let holders = inner.held.len();
                inner.vacant.reserve(holders);
                (holders - 1) as u32
            }
        };
        (holder, piece.start as *mut u8)
    }

    /// One more handle to the same piece.
    pub(super) fn share(&self, holder: u32) {
        self.lock().held[holder as usize].handles += 1;
    }

    pub(super) fn handles(&self, holder: u32) -> usize {
        self.lock().held[holder as usize].handles
    }

    /// The piece counts as `tag` from now on.
    pub(super) fn retag(&self, holder: u32, tag: Tag) {
        let mut inner = self.lock();
        let held = inner.held[holder as usize];
        inner.memory.give(held.tag, held.asked);
        inner.memory.take(tag, held.asked);
        inner.held[holder as usize].tag = tag;
    }

    /// A handle is gone; with the last one the piece is free again.
    pub(super) fn drop_handle(&self, holder: u32) {
        let mut inner = self.lock();
        let held = &mut inner.held[holder as usize];
        held.handles -= 1;
        if held.handles == 0 {
            let held = *held;
            inner.memory.give(held.tag, held.asked);
            inner.vacant.push(holder);
            inner.join(held.piece);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        // Nothing in here panics halfway through a change.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Inner {
    /// Takes the smallest free piece that is large enough, from its front.
    fn cut(&mut self, bytes: usize) -> Piece {
        let fits = |(index, piece): (usize, &Piece)| {
            (piece.bytes >= bytes).then_some((piece.bytes, index))
        };
        let best = self.free.iter().enumerate().filter_map(fits).min();
        let index = best.map(|(_, index)| index).unwrap_or_else(|| self.grow(bytes));
        let piece = &mut self.free[index];
        let cut = Piece { start: piece.start, bytes };
        if piece.bytes == bytes {
            self.free.remove(index);
        } else {
            piece.start += bytes;
            piece.bytes -= bytes;
        }
        cut
    }

    /// A new chunk, as one free piece: its place in the list.
    fn grow(&mut self, bytes: usize) -> usize {
        let bytes = bytes.max(CHUNK);
        let chunk = Chunk::new(bytes + ALIGN);
        let piece = Piece { start: (chunk.start as usize).next_multiple_of(ALIGN), bytes };
        self.chunks.push(chunk);
        self.memory.reserved += bytes;
        let index = self.free.partition_point(|other| other.start < piece.start);
        self.free.insert(index, piece);
        index
    }

    /// Puts a piece back, joined with its free neighbours of the same chunk.
    fn join(&mut self, piece: Piece) {
        let index = self.free.partition_point(|other| other.start < piece.start);
        let touches_before = index > 0 && touch(self.free[index - 1], piece);
        let touches_after = index < self.free.len() && touch(piece, self.free[index]);
        match (touches_before, touches_after) {
            (true, true) => {
                self.free[index - 1].bytes += piece.bytes + self.free[index].bytes;
                self.free.remove(index);
            }
            (true, false) => self.free[index - 1].bytes += piece.bytes,
            (false, true) => {
                self.free[index].start = piece.start;
                self.free[index].bytes += piece.bytes;
            }
            (false, false) => self.free.insert(index, piece),
        }
    }
}

/// Whether `after` begins where `before` ends. Pieces of two chunks never do: a chunk is larger than the
/// pieces in it.
fn touch(before: Piece, after: Piece) -> bool {
    before.start + before.bytes == after.start
}

impl Chunk {
    /// Zeroed memory: what nobody has touched yet costs no page. An alignment beyond the allocator's own
    /// would make it write the zeros, so pieces are aligned by their pool.
    fn new(bytes: usize) -> Chunk {
        let layout = Chunk::layout(bytes);
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        Chunk { start, bytes }
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, 16).expect("a chunk fits in the address space")
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: it came from `alloc_zeroed` with this layout; tensors keep the pool alive, so none is left.
        unsafe { dealloc(self.start, Chunk::layout(self.bytes)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_never_overlap_and_join_again() {
        let pool = Pool::new();
        let mut live: Vec<(u32, usize, usize)> = Vec::new();
        let mut random = 7u64;
        for _ in 0..5_000 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let roll = (random >> 33) as usize;
            if roll % 5 < 3 && live.len() < 60 {
                let bytes = roll % 300_000;
                let (holder, start) = pool.take(bytes, Tag::Activations);
                let (start, end) = (start as usize, start as usize + bytes);
                assert!(
                    live.iter().all(|&(_, from, to)| end <= from || to <= start),
                    "pieces overlap"
                );
                live.push((holder, start, end));
            } else if !live.is_empty() {
                pool.drop_handle(live.swap_remove(roll % live.len()).0);
            }
            assert_eq!(
                pool.memory().total.now,
                live.iter().map(|(_, from, to)| to - from).sum::<usize>()
            );
        }
        live.into_iter().for_each(|(holder, ..)| pool.drop_handle(holder));
        let inner = pool.lock();
        assert_eq!(inner.free.len(), inner.chunks.len(), "all is joined again");
        assert_eq!(
            inner.free.iter().map(|piece| piece.bytes).sum::<usize>(),
            inner.memory.reserved
        );
    }

    #[test]
    fn peaks_and_tags_are_counted_to_the_byte() {
        let pool = Pool::new();
        let (a, _) = pool.take(100, Tag::Parameters);
        let (b, _) = pool.take(11, Tag::Activations);
        pool.drop_handle(b);
        let (c, _) = pool.take(5, Tag::Activations);
        let memory = pool.memory();
        assert_eq!(memory.of(Tag::Activations), super::super::Usage { now: 5, peak: 11 });
        assert_eq!(memory.total, super::super::Usage { now: 105, peak: 111 });
        pool.retag(c, Tag::Gradients);
        assert_eq!(pool.memory().of(Tag::Gradients).now, 5);
        pool.drop_handle(a);
        pool.drop_handle(c);
        assert_eq!(pool.memory().total.now, 0);
    }
}
