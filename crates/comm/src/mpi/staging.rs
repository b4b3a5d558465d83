//! Staging buffers of MPI operations: MPI reads and writes our memory, never the caller's.
//!
//! A started MPI collective cannot be cancelled. When the world breaks we must return an error while the
//! library may still write to the buffers. So data is copied in and out, and the memory of an operation
//! that did not end is never freed. The cost is a copy in, a copy out, and memory of that size per group.

use crate::memory::scratch::Scratch;
use std::ffi::c_int;

#[derive(Default)]
pub(super) struct StagingBuffers {
    buffers: Buffers,
    /// Whether an operation may be using the buffers.
    busy: bool,
}

#[derive(Default)]
struct Buffers {
    out: Scratch,
    inc: Scratch,
    /// Counts and displacements, which MPI also reads until the end of the operation.
    counts: [Vec<c_int>; 4],
}

/// Addresses that an operation is started with.
pub(super) struct Addresses {
    pub out: *const std::ffi::c_void,
    pub inc: *mut std::ffi::c_void,
    pub counts: [*const c_int; 4],
}

impl StagingBuffers {
    /// Copies the data to send, allocates space for the data to receive, and marks the buffers as busy.
    pub(super) fn load(
        &mut self,
        send: &[u8],
        receive: usize,
        counts: [Vec<c_int>; 4],
    ) -> Addresses {
        self.abandon_if_busy();
        let buffers = &mut self.buffers;
        buffers.out.reserve(send.len());
        buffers.out[..send.len()].copy_from_slice(send);
        buffers.inc.reserve(receive);
        buffers.counts = counts;
        self.busy = true;
        Addresses {
            out: buffers.out.as_ptr().cast(),
            inc: buffers.inc.as_mut_ptr().cast(),
            counts: buffers.counts.each_ref().map(|c| c.as_ptr()),
        }
    }

    /// The received data. Call it when the operation has ended.
    pub(super) fn unload(&mut self, receive: usize) -> &[u8] {
        self.busy = false;
        &self.buffers.inc[..receive]
    }

    fn abandon_if_busy(&mut self) {
        if self.busy {
            std::mem::forget(std::mem::take(&mut self.buffers));
            self.busy = false;
        }
    }
}

impl Drop for StagingBuffers {
    fn drop(&mut self) {
        self.abandon_if_busy();
    }
}
