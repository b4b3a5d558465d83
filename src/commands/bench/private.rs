//! Memory that only its own process can reach: what a large `Vec` is in a program that has not installed
//! the `SharedHeap`. Never touches the global allocator, which in this program is that heap.

use lockstep_comm::Element;
use std::alloc::{GlobalAlloc, Layout, System, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// A fixed number of elements from the system's allocator.
pub struct Private<T> {
    first: NonNull<T>,
    len: usize,
}

impl<T: Element> Private<T> {
    pub fn zeroed(len: usize) -> Private<T> {
        if len == 0 {
            return Private { first: NonNull::dangling(), len };
        }
        let layout = layout::<T>(len);
        // SAFETY: the layout is not empty.
        let memory = unsafe { System.alloc_zeroed(layout) };
        let first = NonNull::new(memory.cast::<T>()).unwrap_or_else(|| handle_alloc_error(layout));
        Private { first, len }
    }
}

fn layout<T>(len: usize) -> Layout {
    Layout::array::<T>(len).expect("a buffer is smaller than the address space")
}

impl<T: Element> Deref for Private<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements of ours; all bits zero is a value of every element type.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for Private<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed by nobody else.
        unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr(), self.len) }
    }
}

impl<T> Drop for Private<T> {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: from the system's allocator with this layout.
            unsafe { System.dealloc(self.first.as_ptr().cast(), layout::<T>(self.len)) };
        }
    }
}
