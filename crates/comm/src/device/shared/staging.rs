//! Memory that other processes can open: buffers of a call are copied through it, because the memory of a pool cannot be
//! opened by other processes.

use lockstep_cuda::{Address, CudaError, DeviceBuffer, Gpu, Stream, StreamEvent};

/// Sizes are multiples of this, so that an allocation is never a part of a larger one, whose start others would open.
const STEP: usize = 2 << 20;

/// Words that describe a staging buffer: its number and the name by which it is opened.
pub(super) const WORDS: usize = 9;

/// The staging buffer of this rank, which grows.
#[derive(Default)]
pub(super) struct Staging {
    buffer: Option<(DeviceBuffer, [u64; WORDS])>,
    /// Smaller buffers from before, which other processes may still have open.
    retired: Vec<DeviceBuffer>,
    created: u64,
    /// The end of the last call that used it, on whatever stream.
    last: Option<StreamEvent>,
}

impl Staging {
    /// At least `bytes` bytes that operations of `stream` may use.
    pub fn get(
        &mut self,
        gpu: &Gpu,
        stream: &Stream,
        bytes: usize,
    ) -> Result<(Address, [u64; WORDS]), CudaError> {
        if let Some(last) = &self.last {
            stream.wait_for(last);
        }
        if self.buffer.as_ref().is_none_or(|(buffer, _)| buffer.bytes < bytes) {
            self.retired.extend(self.buffer.take().map(|(buffer, _)| buffer));
            let size = bytes.next_power_of_two().next_multiple_of(STEP);
            let buffer = gpu.context.allocate(size, "a buffer that other processes can open")?;
            self.created += 1;
            let mut words = [self.created; WORDS];
            for (word, bytes) in words[1..].iter_mut().zip(buffer.export()?.chunks(8)) {
                *word = u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
            }
            self.buffer = Some((buffer, words));
        }
        let (buffer, words) = self.buffer.as_ref().expect("just allocated");
        Ok((buffer.address, *words))
    }

    /// Marks the end of a call.
    pub fn used(&mut self, stream: &Stream) {
        self.last = Some(stream.record());
    }
}

/// The staging buffer of another process.
#[derive(Default)]
pub(super) struct PeerStaging {
    opened: Option<(lockstep_cuda::PeerBuffer, u64)>,
}

impl PeerStaging {
    /// The address of the buffer that these words describe.
    pub fn open(&mut self, gpu: &Gpu, words: &[u64]) -> Result<Address, CudaError> {
        if self.opened.as_ref().is_none_or(|(_, number)| *number != words[0]) {
            self.opened = None;
            let mut name = [0; 64];
            for (bytes, word) in name.chunks_mut(8).zip(&words[1..WORDS]) {
                bytes.copy_from_slice(&word.to_le_bytes());
            }
            self.opened = Some((gpu.context.open_peer(name)?, words[0]));
        }
        Ok(self.opened.as_ref().expect("just opened").0.address)
    }
}
