//! Vectors in device memory, at any offset.

use lockstep_comm::{DeviceSlice, Element, bytes_of, bytes_of_mut};
use lockstep_cuda::{DeviceBuffer, Gpu, Stream};

/// Elements that are not at the start of their allocation if `offset` is not zero.
pub struct DeviceVec<T: Element> {
    buffer: DeviceBuffer,
    offset: usize,
    len: usize,
    element: std::marker::PhantomData<T>,
}

impl<T: Element> DeviceVec<T> {
    pub fn new(gpu: &Gpu, stream: &Stream, offset: usize, values: &[T]) -> DeviceVec<T> {
        let bytes = (offset + values.len()) * size_of::<T>();
        let buffer = gpu.context.allocate(bytes, "a test").unwrap();
        let vector = DeviceVec { buffer, offset, len: values.len(), element: Default::default() };
        vector.write(stream, values);
        vector
    }

    pub fn write(&self, stream: &Stream, values: &[T]) {
        assert_eq!(values.len(), self.len);
        if self.len > 0 {
            let (api, from) = (stream.context().api(), bytes_of(values));
            // SAFETY: the buffer has this size; pageable memory is read before the call returns.
            let status = unsafe {
                (api.cuMemcpyHtoDAsync_v2)(
                    self.address(),
                    from.as_ptr().cast(),
                    from.len(),
                    stream.handle(),
                )
            };
            stream.context().must(status, "write");
        }
    }

    pub fn read(&self, stream: &Stream) -> Vec<T> {
        let mut values = vec![T::default(); self.len];
        if self.len > 0 {
            let (api, to) = (stream.context().api(), bytes_of_mut(&mut values));
            // SAFETY: the buffer has this size; the vector is used after `synchronize`.
            let status = unsafe {
                (api.cuMemcpyDtoHAsync_v2)(
                    to.as_mut_ptr().cast(),
                    self.address(),
                    to.len(),
                    stream.handle(),
                )
            };
            stream.context().must(status, "read");
        }
        stream.synchronize();
        values
    }

    pub fn slice(&self) -> DeviceSlice {
        // SAFETY: tests keep the vector until they have read the result.
        unsafe { DeviceSlice::new(self.address(), self.len, T::DTYPE) }
    }

    fn address(&self) -> u64 {
        self.buffer.address + (self.offset * size_of::<T>()) as u64
    }
}
