//! Buffers in device memory.

use crate::group::args::BufferBytes;
use lockstep_cuda::Address;
use lockstep_types::Dtype;

/// `len` elements in the memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlice {
    address: Address,
    len: usize,
    dtype: Dtype,
}

impl DeviceSlice {
    /// # Safety
    /// The elements must be allocated on the GPU of the group they are passed to, and stay so until the stream that they
    /// are passed with has completed the call. Nothing else may write them, or access them if they are an output, between
    /// the operations before and after the call on that stream.
    pub unsafe fn new(address: Address, len: usize, dtype: Dtype) -> DeviceSlice {
        DeviceSlice { address, len, dtype }
    }

    /// No elements.
    pub fn empty(dtype: Dtype) -> DeviceSlice {
        DeviceSlice { address: 0, len: 0, dtype }
    }

    pub fn address(&self) -> Address {
        self.address
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub fn bytes(&self) -> usize {
        self.len * self.dtype.bytes()
    }
}

impl BufferBytes for DeviceSlice {
    fn len(&self) -> usize {
        self.bytes()
    }
}
