//! Copies between device memory and host memory next to the device's operations.
//!
//! A GPU has one copy stream for each direction. Its host memory is page-locked, so that copies run without the host. On a
//! CPU both sides are host memory and a transfer is complete when it is started; owners, counters and the order of calls
//! are the same.

use std::ops::Range;

use super::{Backend, Device, Event};
use crate::memory::Side;
use crate::{Dtype, Location, MemoryUsage, OutOfMemory, Tag, Tensor};

/// Memory of a GPU that optional copies leave free, for workspaces of libraries.
pub const SPARE: usize = 1 << 30;

/// A copy in flight. Owns handles of both tensors, so their memory is not reused before the copy is complete: dropping
/// it waits.
#[must_use]
pub struct Transfer {
    /// Source and target, until they are taken out.
    tensors: Option<(Tensor, Tensor)>,
    done: Event,
}

impl Device {
    /// A tensor in host memory that is counted by [`Device::offloaded_memory`], with unspecified contents. Page-locked on
    /// a machine with a GPU.
    pub fn empty_offloaded(&self, rows: usize, cols: usize, dtype: Dtype, tag: Tag) -> Tensor {
        Tensor::on(Side::Offloaded, &self.0.pool, [rows, cols], dtype, tag)
    }

    /// [`Device::empty_offloaded`], if there is memory left.
    pub fn try_empty_offloaded(
        &self,
        [rows, cols]: [usize; 2],
        dtype: Dtype,
        tag: Tag,
    ) -> Result<Tensor, OutOfMemory> {
        Tensor::try_on(Side::Offloaded, &self.0.pool, [rows, cols], dtype, tag)
    }

    /// [`Device::empty`], if there is memory left.
    pub fn try_empty(
        &self,
        [rows, cols]: [usize; 2],
        dtype: Dtype,
        tag: Tag,
    ) -> Result<Tensor, OutOfMemory> {
        Tensor::try_on(Side::Device, &self.0.pool, [rows, cols], dtype, tag)
    }

    /// Whether a GPU has room for `bytes` more without leaving less than [`SPARE`] to others. False on a CPU.
    pub fn has_room(&self, bytes: usize) -> bool {
        match self.free_bytes() {
            Some(free) => self.0.pool.has_free_piece(bytes) || free >= bytes.saturating_add(SPARE),
            None => false,
        }
    }

    /// Host memory of offloaded tensors.
    pub fn offloaded_memory(&self) -> MemoryUsage {
        self.0.pool.offloaded()
    }

    /// Starts to copy a range of `from` to the elements of `to` from `at` on, when the device has reached `after`.
    /// Operations that are issued later do not wait for it, see [`Device::wait_for`]. Until then nothing may write the
    /// elements of `from` or use those of `to`.
    ///
    /// # Panics
    /// If the dtypes are different, or a range is out of bounds.
    pub fn transfer(
        &self,
        from: Tensor,
        range: Range<usize>,
        to: Tensor,
        at: usize,
        after: &Event,
    ) -> Transfer {
        assert_eq!(from.dtype(), to.dtype(), "transfer of {from:?} to {to:?}");
        let source = from.view().shaped(1, from.len()).part(range);
        // SAFETY: the caller leaves these elements alone until the transfer is complete, and the handle keeps the
        // memory.
        let mut target = unsafe { to.transfer_target(at..at + source.len()) };
        let done = match &self.0.backend {
            Backend::Cpu(_) => {
                target.host_bytes().copy_from_slice(source.host_bytes());
                self.record()
            }
            Backend::Cuda(cuda) => {
                let bytes = source.len() * source.dtype().bytes();
                let to_host = target.location() != Location::Device;
                let (from, to) = (source.address(), target.address());
                after.on_stream(|after| {
                    Event::of_stream(cuda.transfer(from, to, bytes, to_host, after))
                })
            }
        };
        Transfer { tensors: Some((from, to)), done }
    }
}

impl Transfer {
    /// The end of the copy.
    pub fn done(&self) -> &Event {
        &self.done
    }

    /// Blocks the host until the copy is complete, and returns source and target.
    pub fn wait(mut self) -> (Tensor, Tensor) {
        self.done.wait();
        self.tensors.take().expect("taken once")
    }

    /// Operations that are issued later wait for the copy; the host does not. Returns source and target.
    ///
    /// Memory of the device may be reused at once, because its operations run later. Host memory must only be reused by
    /// transfers that wait for an event recorded from now on, or after the host has waited for one.
    pub fn before_later_operations(mut self, device: &Device) -> (Tensor, Tensor) {
        device.wait_for(&self.done);
        self.tensors.take().expect("taken once")
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if self.tensors.is_some() {
            self.done.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_copy_ranges_both_ways() {
        let device = Device::from_env(1);
        let mut x = device.empty(2, 3, Dtype::F32, Tag::Gradients);
        device.write(x.view_mut(), &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let host = device.empty_offloaded(1, 5, Dtype::F32, Tag::Gradients);
        let there = device.transfer(x, 1..5, host, 1, &device.record());
        let (x, host) = there.before_later_operations(&device);
        let y = device.zeros(1, 3, Dtype::F32, Tag::Gradients);
        let back = device.transfer(host, 1..3, y, 1, &device.record());
        let (host, y) = back.before_later_operations(&device);
        assert_eq!(device.to_vec::<f32>(y.view()), [0.0, 1.0 + 1.0, 3.0]);
        assert_eq!(host.view().part(1..5).host::<f32>(), [2.0, 3.0, 4.0, 5.0]);
        drop((x, y));
        assert_eq!(device.memory().of(Tag::Gradients).now, 0);
        assert_eq!(device.offloaded_memory().of(Tag::Gradients).now, 20);
        assert_eq!(device.memory().of(Tag::Gradients).peak, 24 + 12);
    }

    #[test]
    fn the_memory_of_a_transfer_is_not_reused() {
        let device = Device::from_env(1);
        let x = device.zeros(1, 7, Dtype::U32, Tag::Buffers);
        let host = device.empty_offloaded(1, 7, Dtype::U32, Tag::Buffers);
        let transfer = device.transfer(x, 0..7, host, 0, &device.record());
        assert_eq!(device.memory().of(Tag::Buffers).now, 28);
        let (_, host) = transfer.wait();
        assert_eq!(device.memory().of(Tag::Buffers).now, 0);
        assert_eq!(host.view().host::<u32>(), [0; 7]);
    }
}
