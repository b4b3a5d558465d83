//! The memory that MPI operations read and write: ours, never the caller's.
//!
//! An MPI collective that was started cannot be taken back. When its world breaks we must return an
//! error while the library may still write to the buffers, now or whenever another thread lets it
//! move data. So data is copied in and out, and the memory of an operation that did not end is never
//! freed. The price is a copy in, a copy out, and memory of that size that the group keeps.

use crate::memory::scratch::Scratch;
use std::ffi::c_int;

#[derive(Default)]
pub(super) struct Hold {
    memory: Memory,
    /// Whether an operation may be using the memory.
    busy: bool,
}

#[derive(Default)]
struct Memory {
    out: Scratch,
    inc: Scratch,
    /// Counts and displacements; MPI reads these until the end as well.
    counts: [Vec<c_int>; 4],
}

/// The addresses that an operation is started with.
pub(super) struct Room {
    pub out: *const std::ffi::c_void,
    pub inc: *mut std::ffi::c_void,
    pub counts: [*const c_int; 4],
}

impl Hold {
    /// Takes in what is sent, makes room for what is received, and counts as busy from now on.
    pub(super) fn load(&mut self, send: &[u8], receive: usize, counts: [Vec<c_int>; 4]) -> Room {
        self.abandon_if_busy();
        let memory = &mut self.memory;
        memory.out.reserve(send.len());
        memory.out[..send.len()].copy_from_slice(send);
        memory.inc.reserve(receive);
        memory.counts = counts;
        self.busy = true;
        Room {
            out: memory.out.as_ptr().cast(),
            inc: memory.inc.as_mut_ptr().cast(),
            counts: memory.counts.each_ref().map(|c| c.as_ptr()),
        }
    }

    /// What was received. To be called when the operation has ended.
    pub(super) fn unload(&mut self, receive: usize) -> &[u8] {
        self.busy = false;
        &self.memory.inc[..receive]
    }

    fn abandon_if_busy(&mut self) {
        if self.busy {
            std::mem::forget(std::mem::take(&mut self.memory));
            self.busy = false;
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.abandon_if_busy();
    }
}
