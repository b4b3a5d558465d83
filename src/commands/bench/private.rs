//! Memory from the system's allocator, which other processes cannot map. Stands for a large `Vec` in a program that does
//! not install `SharedHeap`, the global allocator of this one.

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
        // SAFETY: the layout has a non-zero size.
        let memory = unsafe { System.alloc_zeroed(layout) };
        let first = NonNull::new(memory.cast::<T>()).unwrap_or_else(|| handle_alloc_error(layout));
        Private { first, len }
    }
}

fn layout<T>(len: usize) -> Layout {
    Layout::array::<T>(len).expect("the buffer fits into the address space")
}

impl<T: Element> Deref for Private<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `first` points to `len` elements that we own; zero bytes are valid for every element type.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for Private<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `&mut self` makes the borrow exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr(), self.len) }
    }
}

impl<T> Drop for Private<T> {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the memory was allocated by `System` with this layout.
            unsafe { System.dealloc(self.first.as_ptr().cast(), layout::<T>(self.len)) };
        }
    }
}
