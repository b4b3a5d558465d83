//! Where the memory of a pool comes from: chunks of host memory, or a GPU's range of addresses that grows.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::sync::Arc;

use lockstep_cuda::{Arena, Context, PinnedBuffer};

use super::Location;

/// Minimum chunk of pageable memory. Untouched pages cost nothing.
const CHUNK: usize = 64 << 20;

/// Minimum chunk of page-locked memory, all of which costs.
const PINNED_CHUNK: usize = 1 << 20;

/// A contiguous range of addresses.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub start: usize,
    pub bytes: usize,
}

impl Piece {
    /// Whether `after` starts where this piece ends.
    pub fn touches(self, after: Piece) -> bool {
        self.start + self.bytes == after.start
    }
}

/// Minimum chunk of device memory, if no piece may span two.
const DEVICE_CHUNK: usize = 256 << 20;

/// Memory of one kind with its free pieces.
pub(super) struct Region {
    source: Source,
    /// Most bytes to take from the system.
    limit: usize,
    /// Least bytes of the next chunk of device memory, if no piece may span two.
    separate: Option<usize>,
    /// Free pieces, sorted by address. Adjacent pieces of one chunk are always merged.
    free: Vec<Piece>,
}

enum Source {
    Host(Vec<HostChunk>),
    Pinned(Arc<Context>, Vec<PinnedBuffer>),
    Device(Arena),
}

impl Region {
    pub fn host() -> Region {
        Region::of(Source::Host(Vec::new()))
    }

    pub fn pinned(context: Arc<Context>) -> Region {
        Region::of(Source::Pinned(context, Vec::new()))
    }

    pub fn device(arena: Arena) -> Region {
        Region::of(Source::Device(arena))
    }

    fn of(source: Source) -> Region {
        Region { source, limit: usize::MAX, separate: None, free: Vec::new() }
    }

    /// Takes no more from the system if that would be more than `bytes` in total.
    pub fn set_limit(&mut self, bytes: usize) {
        self.limit = bytes;
    }

    /// From now on, no piece of device memory spans two chunks. The next one has at least `bytes`, if there is room.
    pub fn separate_chunks(&mut self, bytes: usize) {
        self.separate = Some(bytes.max(DEVICE_CHUNK));
    }

    pub fn separates_chunks(&self) -> bool {
        self.separate.is_some()
    }

    pub fn location(&self) -> Location {
        match self.source {
            Source::Host(_) => Location::Host,
            Source::Pinned(..) => Location::Pinned,
            Source::Device(_) => Location::Device,
        }
    }

    /// Alignment of pieces. On the host two cache lines, so that no two tensors share one; on a GPU what its
    /// libraries are fastest with.
    pub fn alignment(&self) -> usize {
        match self.source {
            Source::Host(_) | Source::Pinned(..) => 128,
            Source::Device(_) => 256,
        }
    }

    /// Bytes allocated from the system.
    pub fn reserved(&self) -> usize {
        match &self.source {
            Source::Host(chunks) => {
                chunks.iter().map(|chunk| chunk.usable(self.alignment()).bytes).sum()
            }
            Source::Pinned(_, chunks) => chunks.iter().map(|chunk| chunk.bytes).sum(),
            Source::Device(arena) => arena.bytes(),
        }
    }

    /// Cuts `bytes` from the front of the smallest free piece that is large enough. None if there is no memory left.
    pub fn cut(&mut self, bytes: usize) -> Option<Piece> {
        let fits = |(index, piece): (usize, &Piece)| {
            (piece.bytes >= bytes).then_some((piece.bytes, index))
        };
        let best = self.free.iter().enumerate().filter_map(fits).min();
        let index = match best {
            Some((_, index)) => index,
            None => self.grow(bytes)?,
        };
        let piece = &mut self.free[index];
        let cut = Piece { start: piece.start, bytes };
        if piece.bytes == bytes {
            self.free.remove(index);
        } else {
            piece.start += bytes;
            piece.bytes -= bytes;
        }
        Some(cut)
    }

    /// Adds memory, so that one free piece has at least `bytes`. Returns its index in the free list.
    fn grow(&mut self, bytes: usize) -> Option<usize> {
        let alignment = self.alignment();
        // A GPU's memory grows in steps, of which the last may exceed the limit.
        let room = self.limit.saturating_sub(self.reserved());
        if bytes > room {
            return None;
        }
        let piece = match &mut self.source {
            Source::Host(chunks) => {
                let chunk = HostChunk::new(bytes.max(CHUNK) + alignment);
                let piece = chunk.usable(alignment);
                chunks.push(chunk);
                piece
            }
            Source::Pinned(context, chunks) => {
                // The driver may place two chunks next to each other; a copy must not span both.
                let chunk = context.allocate_pinned(bytes.max(PINNED_CHUNK) + alignment).ok()?;
                let piece = Piece { start: chunk.start as usize, bytes: chunk.bytes - alignment };
                chunks.push(chunk);
                piece
            }
            Source::Device(arena) => {
                let end = arena.start() as usize + arena.bytes();
                match self.separate {
                    None => {
                        let is_last = |piece: &&Piece| piece.start + piece.bytes == end;
                        let at_end = self.free.last().filter(is_last);
                        let missing = bytes - at_end.map_or(0, |piece| piece.bytes);
                        Piece { start: end, bytes: arena.grow(missing)? }
                    }
                    Some(least) => {
                        self.separate = Some(DEVICE_CHUNK);
                        let needed = bytes + alignment;
                        let grown = arena.grow(least.min(room).max(needed));
                        let grown = grown.or_else(|| arena.grow(needed))?;
                        // The end of a chunk stays unused, so that pieces of two chunks are never adjacent.
                        Piece { start: end, bytes: grown - alignment }
                    }
                }
            }
        };
        self.put(piece);
        Some(
            self.free
                .partition_point(|other| other.start + other.bytes < piece.start + piece.bytes),
        )
    }

    /// Returns a piece and merges it with its free neighbors. Pieces of different chunks are never adjacent, because
    /// each chunk is larger than its pieces.
    pub fn put(&mut self, piece: Piece) {
        let index = self.free.partition_point(|other| other.start < piece.start);
        let touches_before = index > 0 && self.free[index - 1].touches(piece);
        let touches_after = index < self.free.len() && piece.touches(self.free[index]);
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

    /// The memory in words, for the message of an allocation that failed.
    pub fn describe(&self) -> String {
        match &self.source {
            Source::Host(_) => "host memory".to_string(),
            Source::Pinned(..) => "page-locked host memory".to_string(),
            Source::Device(arena) => arena.describe(),
        }
    }

    /// Free pieces, sorted by address.
    pub fn free_pieces(&self) -> &[Piece] {
        &self.free
    }
}

struct HostChunk {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: a chunk is plain memory that only the pool hands out.
unsafe impl Send for HostChunk {}

impl HostChunk {
    /// Allocates zeroed memory, of which untouched pages cost nothing. With an alignment above the allocator's own
    /// it would write the zeros, so the pool aligns the pieces instead.
    fn new(bytes: usize) -> HostChunk {
        let layout = HostChunk::layout(bytes);
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        HostChunk { start, bytes }
    }

    /// The aligned part, which is smaller than the chunk.
    fn usable(&self, alignment: usize) -> Piece {
        Piece {
            start: (self.start as usize).next_multiple_of(alignment),
            bytes: self.bytes - alignment,
        }
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, 16).expect("a chunk fits in the address space")
    }
}

impl Drop for HostChunk {
    fn drop(&mut self) {
        // SAFETY: allocated by `alloc_zeroed` with this layout. Tensors keep the pool alive, so none is left.
        unsafe { dealloc(self.start, HostChunk::layout(self.bytes)) };
    }
}
