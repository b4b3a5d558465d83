//! The memory pool of a device: large chunks, from which pieces are cut and to which they return. Activations of
//! the forward pass become gradients of the backward pass. Once the chunks and lists have grown to what a step
//! needs, nothing is allocated.

use std::sync::{Arc, Mutex};

use lockstep_cuda::{Arena, Context};

use super::region::{Piece, Region};
use super::{Location, MemoryUsage, OutOfMemory, Tag};

/// The memory of a device, and the host memory that belongs to it.
pub(crate) struct Pool {
    inner: Mutex<Inner>,
}

/// Which memory of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    /// The memory that the device computes on.
    Device,
    /// Memory that the host addresses. The same on a CPU.
    Host,
    /// Host memory for states and copies that would otherwise occupy the device. Counted separately.
    Offloaded,
}

struct Inner {
    device: Region,
    /// None on a CPU, whose memory is host memory.
    host: Option<Region>,
    allocations: Vec<Allocation>,
    /// Unused entries of `allocations`.
    vacant: Vec<u32>,
    usage: MemoryUsage,
    /// Usage of `Side::Offloaded`.
    offloaded: MemoryUsage,
}

#[derive(Clone, Copy)]
struct Allocation {
    piece: Piece,
    side: Side,
    /// Bytes requested, before rounding up to the alignment.
    requested: usize,
    tag: Tag,
    /// Number of tensors that share this allocation.
    handles: usize,
}

/// An allocation, with where it is.
pub(super) struct Allocated {
    pub index: u32,
    pub start: *mut u8,
    pub location: Location,
}

impl Pool {
    /// A pool of pageable host memory.
    pub fn host() -> Pool {
        Pool::of(Region::host(), None)
    }

    /// A pool of a GPU's memory and page-locked host memory.
    pub fn cuda(arena: Arena, context: Arc<Context>) -> Pool {
        Pool::of(Region::device(arena), Some(Region::pinned(context)))
    }

    fn of(device: Region, host: Option<Region>) -> Pool {
        let (allocations, vacant) = (Vec::new(), Vec::new());
        let (usage, offloaded) = (MemoryUsage::default(), MemoryUsage::default());
        Pool { inner: Mutex::new(Inner { device, host, allocations, vacant, usage, offloaded }) }
    }

    pub fn usage(&self) -> MemoryUsage {
        let inner = self.lock();
        let host = inner.host.as_ref().map_or(0, Region::reserved);
        MemoryUsage { reserved: inner.device.reserved() + host, ..inner.usage }
    }

    /// Usage of host memory for offloaded states and copies. On a GPU, `reserved` is all of the page-locked memory.
    pub fn offloaded(&self) -> MemoryUsage {
        let inner = self.lock();
        let reserved = inner.host.as_ref().map_or(inner.offloaded.reserved, Region::reserved);
        MemoryUsage { reserved, ..inner.offloaded }
    }

    /// Limits the device memory that is taken from the system.
    pub fn set_limit(&self, bytes: usize) {
        self.lock().device.set_limit(bytes);
    }

    /// Keeps pieces of device memory within one chunk, of which the next has at least `bytes`.
    pub fn separate_chunks(&self, bytes: usize) {
        self.lock().device.separate_chunks(bytes);
    }

    pub fn separates_chunks(&self) -> bool {
        self.lock().device.separates_chunks()
    }

    /// Whether `bytes` of device memory can be allocated without taking more from the system.
    pub fn has_free_piece(&self, bytes: usize) -> bool {
        self.lock().device.free_pieces().iter().any(|piece| piece.bytes >= bytes)
    }

    /// Resets the peaks to the current usage.
    pub fn reset_peaks(&self) {
        let inner = &mut *self.lock();
        for usage in [&mut inner.usage, &mut inner.offloaded] {
            let all = usage.by_tag.iter_mut().chain([&mut usage.total]);
            all.for_each(|usage| usage.peak = usage.now);
        }
    }

    /// Allocates `bytes` with unspecified contents.
    ///
    /// # Panics
    /// If there is no memory left, with an [`OutOfMemory`] that says what holds how much.
    pub(super) fn allocate(&self, bytes: usize, tag: Tag, side: Side) -> Allocated {
        match self.try_allocate(bytes, tag, side) {
            Ok(allocated) => allocated,
            Err(error) => std::panic::panic_any(error),
        }
    }

    /// Allocates `bytes` with unspecified contents, if there is memory left.
    pub(super) fn try_allocate(
        &self,
        bytes: usize,
        tag: Tag,
        side: Side,
    ) -> Result<Allocated, OutOfMemory> {
        let mut inner = self.lock();
        let region = inner.region(side);
        let (location, rounded) =
            (region.location(), bytes.max(1).next_multiple_of(region.alignment()));
        let Some(piece) = region.cut(rounded) else {
            return Err(inner.out_of_memory(bytes, tag, side));
        };
        inner.usage_of(side).add(tag, bytes);
        let allocation = Allocation { piece, side, requested: bytes, tag, handles: 1 };
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
        Ok(Allocated { index, start: piece.start as *mut u8, location })
    }

    /// Adds a handle to an allocation.
    pub(super) fn share(&self, index: u32) {
        self.lock().allocations[index as usize].handles += 1;
    }

    pub(super) fn handles(&self, index: u32) -> usize {
        self.lock().allocations[index as usize].handles
    }

    pub(super) fn tag(&self, index: u32) -> Tag {
        self.lock().allocations[index as usize].tag
    }

    /// Counts the allocation under `tag` from now on.
    pub(super) fn retag(&self, index: u32, tag: Tag) {
        let mut inner = self.lock();
        let Allocation { tag: before, requested, side, .. } = inner.allocations[index as usize];
        let usage = inner.usage_of(side);
        usage.remove(before, requested);
        usage.add(tag, requested);
        inner.allocations[index as usize].tag = tag;
    }

    /// Removes a handle. The last one frees the allocation.
    pub(super) fn drop_handle(&self, index: u32) {
        let mut inner = self.lock();
        let allocation = &mut inner.allocations[index as usize];
        allocation.handles -= 1;
        if allocation.handles == 0 {
            let Allocation { piece, side, requested, tag, .. } = *allocation;
            inner.usage_of(side).remove(tag, requested);
            inner.vacant.push(index);
            inner.region(side).put(piece);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        // No code in here panics in the middle of a change, so a poisoned pool is consistent.
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Inner {
    fn region(&mut self, side: Side) -> &mut Region {
        match (side, &mut self.host) {
            (Side::Host | Side::Offloaded, Some(host)) => host,
            (Side::Host | Side::Offloaded, None) | (Side::Device, _) => &mut self.device,
        }
    }

    fn usage_of(&mut self, side: Side) -> &mut MemoryUsage {
        match side {
            Side::Device | Side::Host => &mut self.usage,
            Side::Offloaded => &mut self.offloaded,
        }
    }

    fn out_of_memory(&mut self, bytes: usize, tag: Tag, side: Side) -> OutOfMemory {
        let usage = *self.usage_of(side);
        let region = self.region(side);
        let usage = MemoryUsage { reserved: region.reserved(), ..usage };
        OutOfMemory { bytes, tag, usage, place: region.describe(), location: region.location() }
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
                let Allocated { index, start, .. } =
                    pool.allocate(bytes, Tag::Activations, Side::Device);
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
        let reserved = pool.usage().reserved;
        let inner = pool.lock();
        let free = inner.device.free_pieces();
        assert_eq!(free.len(), 1, "one free piece per chunk");
        assert_eq!(free.iter().map(|piece| piece.bytes).sum::<usize>(), reserved);
    }

    #[test]
    fn usage_and_peaks_are_exact() {
        let pool = Pool::host();
        let a = pool.allocate(100, Tag::Parameters, Side::Device).index;
        let b = pool.allocate(11, Tag::Activations, Side::Device).index;
        pool.drop_handle(b);
        let c = pool.allocate(5, Tag::Activations, Side::Device).index;
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
