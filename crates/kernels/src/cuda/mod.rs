//! The CUDA backend: one GPU, on which operations are enqueued in order and run behind the host.
//!
//! Built on `lockstep_cuda`. `blaslt` and `dnn` declare the functions that are used of cuBLASLt and cuDNN. The other files
//! are the operations, one per file of `device`; their kernels are in `kernels/`.

pub(crate) mod attention;
pub(crate) mod blaslt;
pub(crate) mod dnn;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod fp8;
pub(crate) mod grouped;
mod launch;
pub(crate) mod loss;
pub(crate) mod matmul;
pub(crate) mod mlp;
pub(crate) mod norm;
pub(crate) mod optimizer;
pub(crate) mod pack;
mod queue;
pub(crate) mod random;
pub(crate) mod reduce;
mod report;
pub(crate) mod rope;
pub(crate) mod routing;
mod scalar;
mod scratch;
pub(crate) mod sort;
mod uploads;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

pub use lockstep_cuda::CudaError;
use lockstep_cuda::{
    Arena, Arg, Context, DeviceBuffer, Gpu, Grid, Kernels, Result, Source, Stream, StreamEvent,
    nvml,
};
pub use queue::OperationCounts;
use queue::{Libraries, Operation, Queue};
pub use report::{CudaLibrary, CudaReport};
pub(crate) use scalar::PendingScalar;
use scalar::ScalarSlots;
use scratch::Scratch;

/// Execution context of the CUDA operations: a GPU, its compute stream, kernels, libraries and scratch memory.
pub(crate) struct Cuda {
    // Fields are dropped in this order: what uses a stream goes before the stream, and all before the context.
    blaslt: blaslt::BlasLt,
    dnn: Option<dnn::Dnn>,
    queue: Queue,
    /// Copies to the device and to the host, which a GPU executes at the same time.
    copy_streams: [Stream; 2],
    kernels: Arc<Kernels>,
    scratch: Scratch,
    scalars: Arc<ScalarSlots>,
    uploads: uploads::Uploads,
    energy: OnceLock<Option<nvml::EnergyCounter>>,
    /// Whether f32 products may round their inputs to TF32.
    tf32: AtomicBool,
    pub grouped: grouped::Trials,
    /// Memory of the kernels that compute fp8 scales.
    amax_state: OnceLock<DeviceBuffer>,
    context: Arc<Context>,
}

/// The GPU completes its operations before their graphs, streams and memory are destroyed.
impl Drop for Cuda {
    fn drop(&mut self) {
        for stream in self.copy_streams.iter().chain([self.queue.raw_stream()]) {
            stream.drain();
        }
    }
}

impl Cuda {
    /// Opens GPU `index` with all libraries.
    pub fn open(index: usize) -> Result<Cuda> {
        let Gpu { context, kernels } = Gpu::open(index)?;
        Cuda::on(context, kernels)
    }

    /// A second compute stream on the same GPU.
    pub fn second(&self) -> Result<Cuda> {
        Cuda::on(self.context.clone(), self.kernels.clone())
    }

    fn on(context: Arc<Context>, kernels: Arc<Kernels>) -> Result<Cuda> {
        let slots = context.allocate_pinned(ScalarSlots::BYTES)?;
        let queue = Queue::new(&context);
        let blaslt = blaslt::BlasLt::load(&context)?;
        // Without cuDNN, attention runs on kernels of our own.
        let dnn = dnn::Dnn::load(queue.raw_stream().handle()).ok();
        let copy_streams = [(); 2].map(|()| Stream::new(context.clone()));
        Ok(Cuda {
            copy_streams,
            scratch: Scratch::new(context.clone()),
            scalars: Arc::new(ScalarSlots::new(slots)),
            uploads: uploads::Uploads::default(),
            blaslt,
            dnn,
            energy: OnceLock::new(),
            tf32: AtomicBool::new(false),
            grouped: grouped::Trials::default(),
            queue,
            amax_state: OnceLock::new(),
            kernels,
            context,
        })
    }

    pub fn set_tf32(&self, on: bool) {
        self.tf32.store(on, Relaxed);
    }

    /// The memory of a pool on this GPU.
    pub fn arena(&self) -> Arena {
        Arena::new(self.context.clone())
    }

    pub fn gpu(&self) -> Gpu {
        Gpu { context: self.context.clone(), kernels: self.kernels.clone() }
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub fn free_bytes(&self) -> usize {
        self.context.free_bytes()
    }

    pub fn multiprocessors(&self) -> usize {
        self.context.multiprocessors
    }

    /// The compute stream, with all operations issued so far.
    pub fn stream(&self) -> &Stream {
        self.queue.flush(self.libraries());
        self.queue.raw_stream()
    }

    pub fn operation_counts(&self) -> OperationCounts {
        self.queue.counts()
    }

    fn push(&self, operation: Operation) {
        self.queue.push(self.libraries(), [], |_| operation);
    }

    fn libraries(&self) -> Libraries<'_> {
        Libraries { blaslt: &self.blaslt, dnn: self.dnn.as_ref() }
    }

    /// Records an event after all operations issued so far.
    pub fn record(&self) -> StreamEvent {
        self.stream().record()
    }

    /// Blocks the host until all operations issued so far are complete.
    pub fn synchronize(&self) {
        self.stream().synchronize();
    }

    pub fn memset(&self, address: u64, byte: u8, bytes: usize) {
        self.push(Operation::Fill { address, byte, bytes });
    }

    /// Copies between two places of device memory.
    pub fn copy(&self, from: u64, to: u64, bytes: usize) {
        self.push(Operation::Copy { from, to, bytes });
    }

    /// Copies from host memory. The slice may change as soon as this returns.
    pub fn write(&self, to: u64, from: &[u8]) {
        let (api, stream) = (self.context.api(), self.stream().handle());
        // SAFETY: the driver has read pageable memory when the call returns.
        let status =
            unsafe { (api.cuMemcpyHtoDAsync_v2)(to, from.as_ptr().cast(), from.len(), stream) };
        self.context.must(status, "copy to the device");
    }

    /// Copies to host memory after all operations issued so far, and waits.
    pub fn read(&self, from: u64, to: &mut [u8]) {
        let (api, stream) = (self.context.api(), self.stream().handle());
        // SAFETY: the slice is not used before `synchronize` returns.
        let status =
            unsafe { (api.cuMemcpyDtoHAsync_v2)(to.as_mut_ptr().cast(), from, to.len(), stream) };
        self.context.must(status, "copy from the device");
        self.synchronize();
    }

    /// Copies between device and page-locked memory on a copy stream, after `after`. Returns the end of the copy.
    pub fn transfer(
        &self,
        from: u64,
        to: u64,
        bytes: usize,
        to_host: bool,
        after: &StreamEvent,
    ) -> StreamEvent {
        let stream = &self.copy_streams[usize::from(to_host)];
        stream.wait_for(after);
        // SAFETY: the caller keeps both ranges until the copy is complete. The driver tells from the addresses which
        // memory they are in.
        let status =
            unsafe { (self.context.api().cuMemcpyAsync)(to, from, bytes, stream.handle()) };
        self.context.must(status, "copy between device and host");
        stream.record()
    }

    /// Joules that the GPU has used since the driver was loaded.
    pub fn joules(&self) -> Option<f64> {
        let counter = self.energy.get_or_init(|| {
            nvml::EnergyCounter::open(self.context.index, self.context.bus_id().as_deref())
        });
        counter.as_ref().and_then(nvml::EnergyCounter::joules)
    }

    /// Bytes of the GPU that this process and others use.
    pub fn used_bytes(&self) -> usize {
        self.context.total_bytes - self.context.free_bytes()
    }

    /// Device memory that lives as long as the buffer and is counted by no tag.
    pub fn buffer(&self, bytes: usize, purpose: &str) -> Result<DeviceBuffer> {
        self.context.allocate(bytes, purpose)
    }
}
