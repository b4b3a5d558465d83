//! Device memory for the duration of one operation. It grows to what the largest operation needs and is used by one
//! operation after the other, in the order of the stream.

use std::sync::{Arc, Mutex, MutexGuard};

use lockstep_cuda::{Context, DeviceBuffer};

use super::Cuda;
use crate::memory::Extent;
use crate::{Dtype, Location, ViewMut};

/// It grows by multiples of this, so that small operations do not let it grow many times.
const STEP: usize = 32 << 20;

pub(crate) struct Scratch {
    context: Arc<Context>,
    buffer: Mutex<Option<DeviceBuffer>>,
}

impl Scratch {
    pub fn new(context: Arc<Context>) -> Scratch {
        Scratch { context, buffer: Mutex::new(None) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<DeviceBuffer>> {
        self.buffer.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Scratch memory of one operation. Operations of other threads wait until it is dropped.
pub(crate) struct ScratchGuard<'a>(MutexGuard<'a, Option<DeviceBuffer>>);

impl ScratchGuard<'_> {
    /// Aligned to 256 bytes.
    pub fn address(&self) -> u64 {
        self.0.as_ref().map_or(0, |buffer| buffer.address)
    }

    /// An f32 matrix that begins `offset` bytes into the memory. The contents are unspecified.
    pub fn as_f32(&self, offset: usize, rows: usize, cols: usize) -> ViewMut<'_> {
        let has = self.0.as_ref().map_or(0, |buffer| buffer.bytes);
        assert!(offset + 4 * rows * cols <= has, "{has} bytes of scratch memory are too few");
        let extent = Extent { rows, cols, dtype: Dtype::F32, location: Location::Device };
        // SAFETY: inside the allocation, which lives as long as the guard. Views of one guard do not overlap.
        unsafe { ViewMut::new((self.address() + offset as u64) as *mut u8, extent) }
    }
}

impl Cuda {
    /// At least `bytes` of device memory, with unspecified contents.
    ///
    /// # Panics
    /// If the GPU has no memory left.
    pub(crate) fn scratch(&self, bytes: usize) -> ScratchGuard<'_> {
        let mut buffer = self.scratch.lock();
        let has = buffer.as_ref().map_or(0, |buffer| buffer.bytes);
        if has < bytes.max(1) {
            // Frees the old one first. The driver waits for the operations on the stream that use it.
            self.stream();
            *buffer = None;
            let bytes = bytes.next_multiple_of(STEP);
            let new = self.scratch.context.allocate(bytes, "scratch memory of operations");
            *buffer = Some(new.unwrap_or_else(|error| panic!("{error}")));
        }
        ScratchGuard(buffer)
    }
}
