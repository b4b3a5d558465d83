//! Device memory for the duration of one operation. It grows to what the largest operation needs and is used by one
//! operation after the other, in the order of the stream. It grows at its end and keeps its address: to free memory would
//! wait for the GPU, whose kernels may wait for another rank.

use std::sync::{Arc, Mutex, MutexGuard};

use lockstep_cuda::{Arena, Context};

use super::Cuda;
use crate::memory::Extent;
use crate::{Dtype, Location, ViewMut};

pub(crate) struct Scratch(Mutex<Arena>);

impl Scratch {
    pub fn new(context: Arc<Context>) -> Scratch {
        Scratch(Mutex::new(Arena::new(context)))
    }
}

/// Scratch memory of one operation. Operations of other threads wait until it is dropped.
pub(crate) struct ScratchGuard<'a>(MutexGuard<'a, Arena>);

impl ScratchGuard<'_> {
    /// Aligned to 256 bytes.
    pub fn address(&self) -> u64 {
        self.0.start()
    }

    /// An f32 matrix that begins `offset` bytes into the memory. The contents are unspecified.
    pub fn as_f32(&self, offset: usize, rows: usize, cols: usize) -> ViewMut<'_> {
        let has = self.0.bytes();
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
        let mut memory = self.scratch.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let missing = bytes.saturating_sub(memory.bytes());
        if missing > 0 && memory.grow(missing).is_none() {
            panic!(
                "no memory for {} MiB of scratch memory of operations: {}",
                bytes.div_ceil(1 << 20),
                memory.describe()
            );
        }
        ScratchGuard(memory)
    }
}
