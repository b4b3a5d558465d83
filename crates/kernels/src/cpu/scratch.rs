//! Working memory of one team member: grows to the largest request and stays.

use std::alloc::{Layout, alloc, dealloc};
use std::sync::Mutex;

/// Memory for panels and tiles, aligned to a page's worth of cache lines.
pub struct Scratch(Mutex<Grown>);

struct Grown {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: `Grown` owns its memory alone, and the mutex hands it to one thread at a time.
unsafe impl Send for Grown {}

const ALIGN: usize = 4096;

impl Scratch {
    pub(crate) fn new() -> Scratch {
        Scratch(Mutex::new(Grown { start: std::ptr::null_mut(), bytes: 0 }))
    }

    /// Lends `bytes` of memory, aligned to 4 KiB, with whatever was last written there.
    ///
    /// # Panics
    /// When it is asked for again while it is lent out.
    pub fn with<R>(&self, bytes: usize, work: impl FnOnce(*mut u8) -> R) -> R {
        let mut grown =
            self.0.try_lock().expect("a member's scratch is used by one kernel at a time");
        grown.reserve(bytes);
        work(grown.start)
    }

    /// Lends room for `len` values, all set to their default.
    pub(crate) fn with_fresh<T: Copy + Default, R>(
        &self,
        len: usize,
        work: impl FnOnce(&mut [T]) -> R,
    ) -> R {
        // An empty request still has an address.
        self.with((len * size_of::<T>()).max(1), |start| {
            let start = start.cast::<T>();
            for i in 0..len {
                // SAFETY: `with` lends at least this many bytes, aligned to more than T needs.
                unsafe { start.add(i).write(T::default()) };
            }
            // SAFETY: written above, and lent to us alone until `work` returns.
            work(unsafe { std::slice::from_raw_parts_mut(start, len) })
        })
    }

    /// How much it has grown to.
    pub fn bytes(&self) -> usize {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).bytes
    }
}

impl Grown {
    fn reserve(&mut self, bytes: usize) {
        if bytes <= self.bytes {
            return;
        }
        self.release();
        let layout =
            Layout::from_size_align(bytes, ALIGN).expect("a scratch fits in the address space");
        // SAFETY: the layout is not empty, as it is larger than what is there.
        self.start = unsafe { alloc(layout) };
        if self.start.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        self.bytes = bytes;
    }

    fn release(&mut self) {
        if self.bytes > 0 {
            let layout = Layout::from_size_align(self.bytes, ALIGN).expect("as it was allocated");
            // SAFETY: `start` came from `alloc` with this layout, and is forgotten here.
            unsafe { dealloc(self.start, layout) };
            self.bytes = 0;
        }
    }
}

impl Drop for Grown {
    fn drop(&mut self) {
        self.release();
    }
}
