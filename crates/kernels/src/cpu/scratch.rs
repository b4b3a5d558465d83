//! Scratch memory of one thread. It grows to the largest request and is kept.

use std::alloc::{Layout, alloc, dealloc};
use std::sync::Mutex;

/// Scratch memory, aligned to 4 KiB.
pub struct Scratch(Mutex<Allocation>);

struct Allocation {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: an `Allocation` owns its memory, and the mutex gives access to one thread at a time.
unsafe impl Send for Allocation {}

const ALIGN: usize = 4096;

impl Scratch {
    pub(crate) fn new() -> Scratch {
        Scratch(Mutex::new(Allocation { start: std::ptr::null_mut(), bytes: 0 }))
    }

    /// Calls `work` with at least `bytes` of memory, with the contents of its last use.
    ///
    /// # Panics
    /// If it is already in use.
    pub fn with<R>(&self, bytes: usize, work: impl FnOnce(*mut u8) -> R) -> R {
        let mut memory =
            self.0.try_lock().expect("a thread's scratch is used by one kernel at a time");
        memory.reserve(bytes);
        work(memory.start)
    }

    /// Calls `work` with `len` values, set to their default.
    pub(crate) fn with_default<T: Copy + Default, R>(
        &self,
        len: usize,
        work: impl FnOnce(&mut [T]) -> R,
    ) -> R {
        // The pointer of an empty request must not be null.
        self.with((len * size_of::<T>()).max(1), |start| {
            let start = start.cast::<T>();
            for i in 0..len {
                // SAFETY: `with` provides at least this many bytes, with sufficient alignment.
                unsafe { start.add(i).write(T::default()) };
            }
            // SAFETY: initialized above, and exclusively borrowed until `work` returns.
            work(unsafe { std::slice::from_raw_parts_mut(start, len) })
        })
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).bytes
    }
}

impl Allocation {
    fn reserve(&mut self, bytes: usize) {
        if bytes <= self.bytes {
            return;
        }
        self.release();
        let layout = Layout::from_size_align(bytes, ALIGN)
            .expect("the size of a scratch buffer fits in the address space");
        // SAFETY: the layout is not empty, because it is larger than the current allocation.
        self.start = unsafe { alloc(layout) };
        if self.start.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        self.bytes = bytes;
    }

    fn release(&mut self) {
        if self.bytes > 0 {
            let layout = Layout::from_size_align(self.bytes, ALIGN)
                .expect("the layout was valid when it was allocated");
            // SAFETY: `start` came from `alloc` with this layout, and is not used again.
            unsafe { dealloc(self.start, layout) };
            self.bytes = 0;
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.release();
    }
}
