//! Numbers that the GPU writes for the host.

use std::sync::{Arc, Mutex};

use lockstep_cuda::{PinnedBuffer, StreamEvent};

use super::Cuda;

/// Scalars that can be pending at the same time.
const SLOTS: usize = 4096;

/// Page-locked memory for pending scalars. The GPU writes to it directly.
pub(crate) struct ScalarSlots {
    memory: PinnedBuffer,
    free: Mutex<Vec<u32>>,
}

impl ScalarSlots {
    /// Bytes of page-locked memory that the slots take.
    pub const BYTES: usize = SLOTS * 8;

    pub fn new(memory: PinnedBuffer) -> ScalarSlots {
        ScalarSlots { memory, free: Mutex::new((0..SLOTS as u32).collect()) }
    }

    fn slot(&self, index: u32) -> *mut f64 {
        // SAFETY: inside the allocation.
        unsafe { self.memory.start.cast::<f64>().add(index as usize) }
    }
}

/// A number that the GPU writes at some point of its stream.
pub(crate) struct PendingScalar {
    slots: Arc<ScalarSlots>,
    index: u32,
    event: StreamEvent,
}

impl PendingScalar {
    /// Waits for the value.
    pub fn get(&self) -> f64 {
        self.event.wait();
        // SAFETY: the GPU wrote the slot before the event, and it is not reused while `self` lives.
        unsafe { self.slots.slot(self.index).read_volatile() }
    }
}

impl Drop for PendingScalar {
    fn drop(&mut self) {
        // A later scalar may take the slot at once: its kernel runs after this one's.
        self.slots.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(self.index);
    }
}

impl Cuda {
    /// An f64 for the host. `write` enqueues the kernel that stores it at the given address.
    pub(crate) fn scalar(&self, write: impl FnOnce(u64)) -> crate::Scalar {
        let free = self.scalars.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).pop();
        let index = free.expect("fewer than 4096 scalars are pending");
        write(self.scalars.slot(index) as u64);
        let (slots, event) = (self.scalars.clone(), self.record());
        crate::Scalar::pending(PendingScalar { slots, index, event })
    }
}
