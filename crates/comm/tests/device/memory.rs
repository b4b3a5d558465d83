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
        write(stream, self.slice(), values);
    }

    pub fn read(&self, stream: &Stream) -> Vec<T> {
        read(stream, self.slice())
    }

    pub fn slice(&self) -> DeviceSlice {
        // SAFETY: tests keep the vector until they have read the result.
        unsafe { DeviceSlice::new(self.address(), self.len, T::DTYPE) }
    }

    fn address(&self) -> u64 {
        self.buffer.address + (self.offset * size_of::<T>()) as u64
    }
}

/// Enqueues a copy to device memory.
pub fn write<T: Element>(stream: &Stream, to: DeviceSlice, values: &[T]) {
    assert_eq!(values.len(), to.len());
    if values.is_empty() {
        return;
    }
    let (api, from) = (stream.context().api(), bytes_of(values));
    // SAFETY: the buffer has this size; pageable memory is read before the call returns.
    let status = unsafe {
        (api.cuMemcpyHtoDAsync_v2)(to.address(), from.as_ptr().cast(), from.len(), stream.handle())
    };
    stream.context().must(status, "write");
}

/// Copies device memory to the host, after the operations of the stream.
pub fn read<T: Element>(stream: &Stream, from: DeviceSlice) -> Vec<T> {
    let mut values = vec![T::default(); from.len()];
    if !values.is_empty() {
        let (api, to) = (stream.context().api(), bytes_of_mut(&mut values));
        // SAFETY: the buffer has this size; the vector is used after `synchronize`.
        let status = unsafe {
            (api.cuMemcpyDtoHAsync_v2)(
                to.as_mut_ptr().cast(),
                from.address(),
                to.len(),
                stream.handle(),
            )
        };
        stream.context().must(status, "read");
    }
    stream.synchronize();
    values
}
