//! A heap that the ranks of a host can reach in each other: an allocator that puts large allocations
//! into one anonymous shared file per process, which peers map when a world forms. With it installed,
//! any large `Vec` is used in place by collectives, like a symmetric buffer.
//!
//! ```
//! #[global_allocator]
//! static HEAP: lockstep_comm::SharedHeap = lockstep_comm::SharedHeap;
//! ```
//!
//! Small allocations, and large ones where the system refuses the file, go to the system's allocator.
//! Freed memory goes back to the operating system at once, and free ranges are always zero.

use crate::call::error::Result;
use crate::call::fold::Op;
use crate::memory::pages;
use crate::memory::segment::{Address, Offer, PAGE, Segment};
use crate::world::World;
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Allocations from this size on are shared.
const LARGE: usize = 256 << 10;
/// Address space of one heap; memory is taken as it is touched.
const CAPACITY: usize = 1 << 38;

/// The allocator to install.
#[derive(Clone, Copy, Debug, Default)]
pub struct SharedHeap;

impl SharedHeap {
    /// Lets large pages take the place of small ones, wherever a large one is in use as a whole: less to look up
    /// when memory is walked through. Copies what it moves, so it is for what stays: call it when what
    /// a program works on has been touched once. How many bytes lie in large pages by it; none where the heap is not
    /// installed, or the system will not have it.
    pub fn enlarge_pages() -> usize {
        match &*lock() {
            State::Open(heap) => pages::enlarge(&heap.segment, heap.end),
            _ => 0,
        }
    }
}

/// Where the heap of this process lies; 0 until it is made. Read without the lock on every free.
static BASE: AtomicUsize = AtomicUsize::new(0);
static HEAP: Mutex<State> = Mutex::new(State::Unused);

enum State {
    Unused,
    /// The system would not have it.
    Refused,
    Open(Heap),
}

struct Heap {
    segment: Segment,
    file: OwnedFd,
    /// Everything from here on was never used.
    end: usize,
    /// Free ranges before `end`, by offset, none next to another.
    free: BTreeMap<usize, usize>,
}

fn lock() -> MutexGuard<'static, State> {
    HEAP.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

// SAFETY: memory comes from the system's allocator or from ranges of the shared file that are handed
// out once until they are freed; which of the two is told by the address.
unsafe impl GlobalAlloc for SharedHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match shared(layout) {
            Some(pointer) => pointer,
            // SAFETY: the caller's promise.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match shared(layout) {
            // Free ranges are zero.
            Some(pointer) => pointer,
            // SAFETY: the caller's promise.
            None => unsafe { System.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        match offset_of(pointer) {
            Some(offset) => give_back(offset, layout.size()),
            // SAFETY: not from the shared file, so from the system.
            None => unsafe { System.dealloc(pointer, layout) },
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if offset_of(pointer).is_none() && size < LARGE {
            // SAFETY: from the system, and stays there.
            return unsafe { System.realloc(pointer, layout, size) };
        }
        // SAFETY: the caller's promise: `size` is valid for this alignment, and `pointer` is live.
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

/// Where in the heap of this process an address lies, if it does.
pub(crate) fn offset_of(pointer: *const u8) -> Option<usize> {
    let base = BASE.load(Ordering::Acquire);
    let offset = (pointer as usize).checked_sub(base)?;
    (base != 0 && offset < CAPACITY).then_some(offset)
}

fn give_back(offset: usize, size: usize) {
    let len = size.next_multiple_of(PAGE);
    let mut state = lock();
    let Some(heap) = state.open() else { return };
    let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (at, bytes) = (offset as libc::off_t, len as libc::off_t);
    // SAFETY: a plain call on a file of ours. Peers have the file mapped, but no call of a group that
    // uses this range is under way: its owner has just given it up.
    if unsafe { libc::fallocate(heap.file.as_raw_fd(), hole, at, bytes) } != 0 {
        // The memory stays ours; clear it, so that free ranges are zero all the same.
        // SAFETY: the range was handed out by us and is free now.
        unsafe { std::ptr::write_bytes(heap.segment.at(offset), 0, len) };
    }
    // Joined with its free neighbours.
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

/// The heaps of the other ranks of this host, by world rank, as mapped here. Our own has no second mapping: its pages
/// would count twice.
#[derive(Debug, Default)]
pub(crate) struct Heaps(Vec<Option<Arc<Segment>>>);

impl Heaps {
    /// An address in a rank's heap, in our own address space.
    pub(crate) fn at(&self, rank: usize, offset: u64) -> Option<*mut u8> {
        self.0.get(rank)?.as_ref().map(|heap| heap.at(offset as usize))
    }

    /// Gives up the pages of others that we have touched: they stay theirs, and no longer count as ours too.
    pub(crate) fn let_go(&self) {
        self.0.iter().flatten().for_each(|heap| heap.let_go());
    }
}

/// Maps the heaps of all ranks of the host, if all ranks have one and can map all the others'.
pub(crate) fn share(world: &World) -> Result<()> {
    let rank = world.rank();
    let own = address().map_or([0, -1], |a| [a.pid as i64, a.fd as i64]);
    let mut all = vec![0i64; 2 * world.size()];
    world.all_gather(&own, &mut all)?;
    let hosts = world.hosts();
    let map = |r: usize| {
        let address = Address { pid: all[2 * r] as u64, fd: all[2 * r + 1] as u64 };
        let near = r != rank && hosts[r] == hosts[rank] && all[2 * r + 1] >= 0;
        near.then(|| Segment::open(address, CAPACITY).ok().map(Arc::new)).flatten()
    };
    let heaps: Vec<_> = (0..world.size()).map(map).collect();
    let others = |r: &usize| *r != rank && hosts[*r] == hosts[rank];
    let whole = (0..world.size()).filter(others).all(|r| heaps[r].is_some());
    let mut verdict = [i32::from(whole && own[1] >= 0)];
    world.all_reduce(&mut verdict, Op::Min)?;
    if verdict[0] == 1 {
        let _ = world.context().heaps.set(Heaps(heaps));
    }
    Ok(())
}

/// Where peers find our heap; nothing if the allocator is not installed or was refused its file.
fn address() -> Option<Address> {
    // If the allocator is installed, this makes the heap, if there is none yet.
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
    fn ranges_are_zero_apart_and_used_again() {
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
