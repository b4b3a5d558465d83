//! The memory pool of a device: large chunks, from which pieces are cut and to which they return. Activations of
//! the forward pass become gradients of the backward pass. Once the chunks and lists have grown to what a step
//! needs, nothing is allocated.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::sync::Mutex;

use super::{Location, MemoryUsage, Tag};

/// Alignment of pieces: two cache lines, so that no two tensors share one.
const ALIGN: usize = 128;

/// Minimum chunk size. Untouched pages cost nothing.
const CHUNK: usize = 64 << 20;

/// The memory of a device.
pub(crate) struct Pool {
    location: Location,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    chunks: Vec<Chunk>,
    /// Free pieces, sorted by address. Adjacent pieces of one chunk are always merged.
    free: Vec<Piece>,
    allocations: Vec<Allocation>,
    /// Unused entries of `allocations`.
    vacant: Vec<u32>,
    usage: MemoryUsage,
}

struct Chunk {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: a chunk is plain memory that only the pool hands out.
unsafe impl Send for Chunk {}

#[derive(Clone, Copy)]
struct Piece {
    start: usize,
    bytes: usize,
}

#[derive(Clone, Copy)]
struct Allocation {
    piece: Piece,
    /// Bytes requested, before rounding up to `ALIGN`.
    requested: usize,
    tag: Tag,
    /// Number of tensors that share this allocation.
    handles: usize,
}

impl Pool {
    /// A pool of pageable host memory.
    pub fn host() -> Pool {
        Pool { location: Location::Host, inner: Mutex::default() }
    }

    pub fn location(&self) -> Location {
        self.location
    }

    pub fn usage(&self) -> MemoryUsage {
        self.lock().usage
    }

    /// Resets the peaks to the current usage.
    pub fn reset_peaks(&self) {
        let usage = &mut self.lock().usage;
        usage.by_tag.iter_mut().chain([&mut usage.total]).for_each(|usage| usage.peak = usage.now);
    }

    /// Allocates `bytes` with unspecified contents. Returns the allocation's index and address.
    pub(super) fn allocate(&self, bytes: usize, tag: Tag) -> (u32, *mut u8) {
        let mut inner = self.lock();
        let piece = inner.cut(bytes.max(1).next_multiple_of(ALIGN));
        inner.usage.add(tag, bytes);
        let allocation = Allocation { piece, requested: bytes, tag, handles: 1 };
        let index = match inner.vacant.pop() {
            Some(index) => {
                inner.allocations[index as usize] = allocation;
                index
            }
            None => {
                inner.allocations.push(allocation);
                // When all allocations are freed, all of them are on this list; freeing must not allocate.
                let count = inner.allocations.len();
                inner.vacant.reserve(count);
                (count - 1) as u32
            }
        };
        (index, piece.start as *mut u8)
    }

    /// Adds a handle to an allocation.
    pub(super) fn share(&self, index: u32) {
        self.lock().allocations[index as usize].handles += 1;
    }

    pub(super) fn handles(&self, index: u32) -> usize {
        self.lock().allocations[index as usize].handles
    }

    /// Counts the allocation under `tag` from now on.
    pub(super) fn retag(&self, index: u32, tag: Tag) {
        let mut inner = self.lock();
        let Allocation { tag: before, requested, .. } = inner.allocations[index as usize];
        inner.usage.remove(before, requested);
        inner.usage.add(tag, requested);
        inner.allocations[index as usize].tag = tag;
    }

    /// Removes a handle. The last one frees the allocation.
    pub(super) fn drop_handle(&self, index: u32) {
        let mut inner = self.lock();
        let allocation = &mut inner.allocations[index as usize];
        allocation.handles -= 1;
        if allocation.handles == 0 {
            let Allocation { piece, requested, tag, .. } = *allocation;
            inner.usage.remove(tag, requested);
            inner.vacant.push(index);
            inner.free(piece);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        // No code in here panics in the middle of a change, so a poisoned pool is consistent.
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Inner {
    /// Cuts `bytes` from the front of the smallest free piece that is large enough.
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

    /// Allocates a new chunk as one free piece. Returns its index in the free list.
    fn grow(&mut self, bytes: usize) -> usize {
        let bytes = bytes.max(CHUNK);
        let chunk = Chunk::new(bytes + ALIGN);
        let piece = Piece { start: (chunk.start as usize).next_multiple_of(ALIGN), bytes };
        self.chunks.push(chunk);
        self.usage.reserved += bytes;
        let index = self.free.partition_point(|other| other.start < piece.start);
        self.free.insert(index, piece);
        index
    }

    /// Returns a piece and merges it with its free neighbors.
    fn free(&mut self, piece: Piece) {
        let index = self.free.partition_point(|other| other.start < piece.start);
        let touches_before = index > 0 && adjacent(self.free[index - 1], piece);
        let touches_after = index < self.free.len() && adjacent(piece, self.free[index]);
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

/// Whether `after` starts where `before` ends. Pieces of different chunks are never adjacent, because each chunk is
/// larger than its pieces.
fn adjacent(before: Piece, after: Piece) -> bool {
    before.start + before.bytes == after.start
}

impl Chunk {
    /// Allocates zeroed memory, of which untouched pages cost nothing. With an alignment above the allocator's own
    /// it would write the zeros, so the pool aligns the pieces instead.
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
        // SAFETY: allocated by `alloc_zeroed` with this layout. Tensors keep the pool alive, so none is left.
        unsafe { dealloc(self.start, Chunk::layout(self.bytes)) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::Usage;
    use super::*;

    #[test]
    fn pieces_never_overlap_and_merge_when_freed() {
        let pool = Pool::host();
        let mut live: Vec<(u32, usize, usize)> = Vec::new();
        let mut random = 7u64;
        for _ in 0..5_000 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let draw = (random >> 33) as usize;
            if draw % 5 < 3 && live.len() < 60 {
                let bytes = draw % 300_000;
                let (index, start) = pool.allocate(bytes, Tag::Activations);
                let (start, end) = (start as usize, start as usize + bytes);
                assert!(
                    live.iter().all(|&(_, from, to)| end <= from || to <= start),
                    "pieces overlap"
                );
                live.push((index, start, end));
            } else if !live.is_empty() {
                pool.drop_handle(live.swap_remove(draw % live.len()).0);
            }
            assert_eq!(
                pool.usage().total.now,
                live.iter().map(|(_, from, to)| to - from).sum::<usize>()
            );
        }
        live.into_iter().for_each(|(index, ..)| pool.drop_handle(index));
        let inner = pool.lock();
        assert_eq!(inner.free.len(), inner.chunks.len(), "one free piece per chunk");
        assert_eq!(inner.free.iter().map(|piece| piece.bytes).sum::<usize>(), inner.usage.reserved);
    }

    #[test]
    fn usage_and_peaks_are_exact() {
        let pool = Pool::host();
        let (a, _) = pool.allocate(100, Tag::Parameters);
        let (b, _) = pool.allocate(11, Tag::Activations);
        pool.drop_handle(b);
        let (c, _) = pool.allocate(5, Tag::Activations);
        let usage = pool.usage();
        assert_eq!(usage.of(Tag::Activations), Usage { now: 5, peak: 11 });
        assert_eq!(usage.total, Usage { now: 105, peak: 111 });
        pool.retag(c, Tag::Gradients);
        assert_eq!(pool.usage().of(Tag::Gradients).now, 5);
        pool.drop_handle(a);
        pool.drop_handle(c);
        assert_eq!(pool.usage().total.now, 0);
    }
}
