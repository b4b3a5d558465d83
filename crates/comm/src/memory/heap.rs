//! Shared heap: a global allocator that puts large allocations into one anonymous shared file per process,
//! which the other ranks of the host map when a world starts. With it installed, collectives use any large
//! `Vec` in place, like a symmetric buffer.
//!
//! ```
//! #[global_allocator]
//! static HEAP: lockstep_comm::SharedHeap = lockstep_comm::SharedHeap;
//! ```
//!
//! Small allocations, and large ones if the file cannot be created, use the system's allocator. Freed
//! memory is returned to the operating system immediately, and free ranges are always zero.

use crate::memory::pages;
use crate::memory::segment::{Address, Offer, PAGE, Segment};
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Allocations from this size on are shared.
const LARGE: usize = 256 << 10;
/// Address space of one heap; memory is allocated when it is touched.
pub(crate) const CAPACITY: usize = 1 << 38;

/// The allocator to install.
#[derive(Clone, Copy, Debug, Default)]
pub struct SharedHeap;

impl SharedHeap {
    /// Collapses the heap into huge pages, wherever all small pages of one are in use, which reduces TLB
    /// misses. Copies the data, so call it once the long-lived memory of a program has been touched.
    /// Returns the number of bytes in huge pages; zero if the heap is not installed or the system does
    /// not support it.
    pub fn use_huge_pages() -> usize {
        match &*lock() {
            State::Open(heap) => pages::collapse(&heap.segment, heap.end),
            _ => 0,
        }
    }
}

/// Address of this process's heap; 0 until it is created. Read without the lock on every free.
static BASE: AtomicUsize = AtomicUsize::new(0);
static HEAP: Mutex<State> = Mutex::new(State::Unused);

enum State {
    Unused,
    /// The system refused to create the file.
    Refused,
    Open(Heap),
}

struct Heap {
    segment: Segment,
    file: OwnedFd,
    /// Everything from here on is unused.
    end: usize,
    /// Free ranges before `end`, by offset; adjacent ranges are merged.
    free: BTreeMap<usize, usize>,
}

fn lock() -> MutexGuard<'static, State> {
    HEAP.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

// SAFETY: memory comes from the system's allocator or from ranges of the shared file that are in use once
// until they are freed; the address tells which of the two.
unsafe impl GlobalAlloc for SharedHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match shared(layout) {
            Some(pointer) => pointer,
            // SAFETY: guaranteed by the caller.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match shared(layout) {
            // Free ranges are zero.
            Some(pointer) => pointer,
            // SAFETY: guaranteed by the caller.
            None => unsafe { System.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        match offset_of(pointer) {
            Some(offset) => free_range(offset, layout.size()),
            // SAFETY: not from the shared file, so from the system.
            None => unsafe { System.dealloc(pointer, layout) },
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if offset_of(pointer).is_none() && size < LARGE {
            // SAFETY: from the system, and stays there.
            return unsafe { System.realloc(pointer, layout, size) };
        }
        // SAFETY: the caller guarantees that `size` is valid for this alignment and `pointer` is live.
        unsafe {
            let new = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !new.is_null() {
                std::ptr::copy_nonoverlapping(pointer, new, layout.size().min(size));
                self.dealloc(pointer, layout);
            }
            new
        }
    }
}

/// A range of the shared file, if the allocation is large and there is a file.
fn shared(layout: Layout) -> Option<*mut u8> {
    if layout.size() < LARGE || layout.align() > PAGE {
        return None;
    }
    let len = layout.size().next_multiple_of(PAGE);
    let mut state = lock();
    let heap = state.open()?;
    let fit = heap.free.iter().find(|(_, free)| **free >= len).map(|(at, free)| (*at, *free));
    let at = match fit {
        Some((at, free)) => {
            heap.free.remove(&at);
            if free > len {
                heap.free.insert(at + len, free - len);
            }
            at
        }
        None if heap.end + len <= CAPACITY => {
            heap.end += len;
            heap.end - len
        }
        None => return None,
    };
    Some(heap.segment.at(at))
}

impl State {
    fn open(&mut self) -> Option<&mut Heap> {
        if let State::Unused = self {
            *self = match Segment::create(CAPACITY) {
                Ok((segment, offer)) => {
                    BASE.store(segment.at(0) as usize, Ordering::Release);
                    let file = offer.into_file();
                    State::Open(Heap { segment, file, end: 0, free: BTreeMap::new() })
                }
                Err(_) => State::Refused,
            };
        }
        match self {
            State::Open(heap) => Some(heap),
            _ => None,
        }
    }
}

/// Offset of an address in the heap of this process, if it is inside.
pub(crate) fn offset_of(pointer: *const u8) -> Option<usize> {
    let base = BASE.load(Ordering::Acquire);
    let offset = (pointer as usize).checked_sub(base)?;
    (base != 0 && offset < CAPACITY).then_some(offset)
}

fn free_range(offset: usize, size: usize) {
    let len = size.next_multiple_of(PAGE);
    let mut state = lock();
    let Some(heap) = state.open() else { return };
    let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (at, bytes) = (offset as libc::off_t, len as libc::off_t);
    // SAFETY: our own file. Peers have it mapped, but no call of a group uses this range: its owner has
    // just freed it.
    if unsafe { libc::fallocate(heap.file.as_raw_fd(), hole, at, bytes) } != 0 {
        // The memory stays allocated; clear it, because free ranges must be zero.
        // SAFETY: the range was allocated by us and is free now.
        unsafe { std::ptr::write_bytes(heap.segment.at(offset), 0, len) };
    }
    // Merge with free neighbours.
    let mut range = (offset, len);
    if let Some((&before, &size)) = heap.free.range(..offset).next_back()
        && before + size == offset
    {
        heap.free.remove(&before);
        range = (before, size + len);
    }
    if let Some(size) = heap.free.remove(&(range.0 + range.1)) {
        range.1 += size;
    }
    if range.0 + range.1 == heap.end {
        heap.end = range.0;
    } else {
        heap.free.insert(range.0, range.1);
    }
}

/// Our mappings of the heaps of the other ranks of this host, by world rank. Our own heap is not mapped a
/// second time: its pages would count twice.
#[derive(Debug, Default)]
pub(crate) struct PeerHeaps(pub Vec<Option<Segment>>);

impl PeerHeaps {
    /// Address in our mapping of a rank's heap.
    pub(crate) fn at(&self, rank: usize, offset: u64) -> Option<*mut u8> {
        self.0.get(rank)?.as_ref().map(|heap| heap.at(offset as usize))
    }

    /// Unmaps the pages that we have touched, so that they count only as their owners' memory.
    pub(crate) fn release_pages(&self) {
        self.0.iter().flatten().for_each(Segment::release_pages);
    }
}

/// Address of our heap for peers; `None` if the allocator is not installed or has no file.
pub(crate) fn address() -> Option<Address> {
    // If the allocator is installed, this creates the heap.
    drop(std::hint::black_box(Vec::<u8>::with_capacity(LARGE)));
    match &*lock() {
        State::Open(heap) => Some(Offer::address_of(&heap.file)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses the allocator directly: the tests of this crate do not install it.
    #[test]
    fn freed_ranges_are_zero_and_reused() {
        let layout = |bytes: usize| Layout::from_size_align(bytes, 64).unwrap();
        let heap = SharedHeap;
        // SAFETY: live allocations, used within their size and freed with their layout.
        unsafe {
            let a = heap.alloc(layout(LARGE));
            let b = heap.alloc(layout(3 * LARGE + 5));
            assert!(offset_of(a).is_some() && offset_of(b).is_some());
            a.write_bytes(7, LARGE);
            b.write_bytes(9, 3 * LARGE + 5);
            assert_eq!((*a.add(LARGE - 1), *b), (7, 9));
            heap.dealloc(a, layout(LARGE));
            let again = heap.alloc_zeroed(layout(LARGE));
            assert_eq!(again, a, "the first range that fits");
            let bytes = std::slice::from_raw_parts(again, LARGE);
            assert!(bytes.iter().all(|x| *x == 0));
            let grown = heap.realloc(b, layout(3 * LARGE + 5), 8 * LARGE);
            assert_eq!(*grown.add(3 * LARGE + 4), 9);
            heap.dealloc(again, layout(LARGE));
            heap.dealloc(grown, layout(8 * LARGE));
            let small = heap.alloc(layout(100));
            assert_eq!(offset_of(small), None);
            heap.dealloc(small, layout(100));
        }
    }
}
