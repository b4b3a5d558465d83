//! The boundary between models and hardware. A device allocates tensors and executes operations on them in order;
//! models see nothing below it. Every operation matches on the backend, so a new backend compiles only when each
//! operation has an arm for it.
//!
//! Operations may run asynchronously. Only [`Device::read`], [`Scalar::get`], [`Device::synchronize`] and
//! [`Event::wait`] wait for results. The CPU backend completes every operation before it returns.

mod attention;
mod elementwise;
mod embedding;
mod event;
mod fp8;
mod fp8_history;
mod grouped;
mod loss;
mod matmul;
mod meter;
mod mlp;
mod norm;
mod optimizer;
mod pack;
mod random;
mod rope;
mod routing;
mod scalar;
mod transfer;

use std::sync::Arc;

pub use attention::{AttentionDelta, AttentionOutput, AttentionShape};
pub use embedding::{PositionRange, VocabShard};
pub use event::Event;
pub use fp8::{FP8_MULTIPLE, Fp8Cast, Fp8Copies, Fp8Format, Fp8Scales, Fp8Source, Fp8Tensor};
pub use fp8_history::Fp8History;
pub(crate) use fp8_history::SlotPlace;
pub(crate) use grouped::GroupedKind;
pub use grouped::{GroupedMatmul, RowGroups, Stack};
pub use lockstep_types::OpClass;
pub use loss::{CrossEntropy, IGNORED, LogitGradient, LogitShard, SoftmaxStats};
pub use matmul::Matmul;
pub use meter::Meter;
pub use norm::{NormGradients, NormParams};
pub use optimizer::{AdamW, OptimizerState};
pub use pack::Code;
pub(crate) use pack::SCALE_CHUNK;
pub use random::{DropoutMask, RandomKey};
pub use rope::{RopeScaling, RopeTable};
pub use routing::{Capacity, Combine, DROPPED, Router, RouterOutput, RouterSaved};
pub use scalar::Scalar;
pub use transfer::{SPARE, Transfer};

use lockstep_cuda::{Gpu, Stream};

use crate::cpu::Cpu;
use crate::cuda::{Cuda, CudaError, CudaReport, OperationCounts};
use crate::memory::{Pool, Side};
use crate::{DeviceType, Dtype, Element, MemoryUsage, Tag, Tensor, View, ViewMut};

/// A device that holds tensors and computes on them. Clones refer to the same device.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    backend: Backend,
    pool: Arc<Pool>,
    meter: Meter,
}

/// The hardware behind a device.
enum Backend {
    Cpu(Cpu),
    Cuda(Box<Cuda>),
}

impl Device {
    /// The CPU, with `threads` threads.
    pub fn cpu(threads: usize) -> Device {
        Device(Arc::new(Inner {
            backend: Backend::Cpu(Cpu::new(threads)),
            pool: Arc::new(Pool::host()),
            meter: Meter::new(),
        }))
    }

    /// GPU `index` of this machine.
    pub fn cuda(index: usize) -> Result<Device, CudaError> {
        Ok(Device::of_cuda(Cuda::open(index)?))
    }

    /// Number of GPUs that the CUDA driver finds.
    pub fn cuda_count() -> Result<usize, CudaError> {
        lockstep_cuda::Gpu::count()
    }

    fn of_cuda(cuda: Cuda) -> Device {
        let pool = Arc::new(Pool::cuda(cuda.arena(), cuda.context().clone()));
        Device(Arc::new(Inner {
            backend: Backend::Cuda(Box::new(cuda)),
            pool,
            meter: Meter::new(),
        }))
    }

    /// The device that `LOCKSTEP_DEVICE` names: `cpu` or `cuda`. None if it is not set or `auto`.
    pub fn type_from_env() -> Result<Option<DeviceType>, String> {
        match std::env::var("LOCKSTEP_DEVICE").as_deref() {
            Err(_) | Ok("" | "auto") => Ok(None),
            Ok("cpu") => Ok(Some(DeviceType::Cpu)),
            Ok("cuda") => Ok(Some(DeviceType::Cuda)),
            Ok(other) => Err(format!("LOCKSTEP_DEVICE={other}: use auto, cpu or cuda")),
        }
    }

    /// A device for tests: the first GPU if `LOCKSTEP_DEVICE` is `cuda`, otherwise the CPU with `threads` threads.
    ///
    /// # Panics
    /// If `LOCKSTEP_DEVICE` is invalid, or the GPU cannot be used.
    pub fn from_env(threads: usize) -> Device {
        match Device::type_from_env() {
            Ok(None | Some(DeviceType::Cpu)) => Device::cpu(threads),
            Ok(Some(DeviceType::Cuda)) => {
                Device::cuda(0).unwrap_or_else(|error| panic!("LOCKSTEP_DEVICE=cuda: {error}"))
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// A device on the same hardware for a communication thread, which computes next to this one: on the CPU it has
    /// one thread, on a GPU a stream of its own. It has its own memory pool and meter.
    pub fn background(&self) -> Device {
        match &self.0.backend {
            Backend::Cpu(_) => Device::cpu(1),
            Backend::Cuda(cuda) => {
                let second = cuda.second().unwrap_or_else(|error| panic!("{error}"));
                let device = Device::of_cuda(second);
                if self.0.pool.separates_chunks() {
                    device.separate_chunks(0);
                }
                device
            }
        }
    }

    /// The GPU of this device, for communication. None on a CPU.
    pub fn gpu(&self) -> Option<Gpu> {
        match &self.0.backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => Some(cuda.gpu()),
        }
    }

    /// The stream on which operations run, with all that were issued so far, for communication. None on a CPU.
    pub fn stream(&self) -> Option<&Stream> {
        match &self.0.backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => Some(cuda.stream()),
        }
    }

    pub fn device_type(&self) -> DeviceType {
        match &self.0.backend {
            Backend::Cpu(_) => DeviceType::Cpu,
            Backend::Cuda(_) => DeviceType::Cuda,
        }
    }

    /// Whether this machine has a GPU that can be used, without opening it.
    pub fn check_cuda() -> Result<(), CudaError> {
        lockstep_cuda::Gpu::check()
    }

    /// Lets f32 products of a GPU round their inputs to TF32, which has 10 bits of mantissa and is several times
    /// faster. Off at first. No effect on a CPU.
    pub fn set_tf32(&self, on: bool) {
        match &self.0.backend {
            Backend::Cpu(_) => {}
            Backend::Cuda(cuda) => cuda.set_tf32(on),
        }
    }

    /// From now on, no tensor of a GPU spans two allocations of the driver, so that each of them can be registered with a
    /// library of communication. The next allocation has at least `bytes`, if there is room. No effect on a CPU.
    pub fn separate_chunks(&self, bytes: usize) {
        self.0.pool.separate_chunks(bytes);
    }

    /// Limits the memory that tensors may take. An allocation beyond it fails as if the device had no more.
    pub fn set_memory_limit(&self, bytes: usize) {
        self.0.pool.set_limit(bytes);
    }

    /// Joules that a GPU has used since its driver was loaded, if it tells.
    pub fn joules(&self) -> Option<f64> {
        match &self.0.backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => cuda.joules(),
        }
    }

    /// Free bytes of a GPU. None on a CPU.
    pub fn free_bytes(&self) -> Option<usize> {
        match &self.0.backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => Some(cuda.free_bytes()),
        }
    }

    /// Bytes of a GPU that are in use, by this process with its libraries and by others. None on a CPU.
    pub fn used_bytes(&self) -> Option<usize> {
        match &self.0.backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => Some(cuda.used_bytes()),
        }
    }

    /// Operations that were put on the stream of a GPU so far. None on a CPU.
    pub fn operation_counts(&self) -> Option<OperationCounts> {
        match &self.0.backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => Some(cuda.operation_counts()),
        }
    }

    /// The GPU and its libraries, if this device is one.
    pub fn cuda_report(&self) -> Option<CudaReport> {
        match &self.0.backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => Some(cuda.report()),
        }
    }

    /// A tensor with unspecified contents.
    pub fn empty(&self, rows: usize, cols: usize, dtype: Dtype, tag: Tag) -> Tensor {
        Tensor::new(&self.0.pool, rows, cols, dtype, tag)
    }

    /// A tensor of zeros.
    pub fn zeros(&self, rows: usize, cols: usize, dtype: Dtype, tag: Tag) -> Tensor {
        let mut tensor = self.empty(rows, cols, dtype, tag);
        self.fill(tensor.view_mut(), 0.0);
        tensor
    }

    /// A tensor in host memory, with unspecified contents. Reading it never waits for the device.
    pub fn empty_host(&self, rows: usize, cols: usize, dtype: Dtype, tag: Tag) -> Tensor {
        Tensor::on(Side::Host, &self.0.pool, [rows, cols], dtype, tag)
    }

    /// Moves a tensor to host memory. Waits for all operations issued before.
    pub fn to_host(&self, tensor: Tensor) -> Tensor {
        match &self.0.backend {
            Backend::Cpu(_) => tensor,
            Backend::Cuda(_) if tensor.location().is_host_accessible() => tensor,
            Backend::Cuda(cuda) => {
                let (rows, cols) = (tensor.rows(), tensor.cols());
                let mut host = self.empty_host(rows, cols, tensor.dtype(), tensor.tag());
                cuda.read(tensor.view().address(), host.view_mut().host_bytes());
                host
            }
        }
    }

    /// Copies from the host to the device.
    pub fn write<E: Element>(&self, to: ViewMut<'_>, from: &[E]) {
        match &self.0.backend {
            Backend::Cuda(cuda) if !to.location().is_host_accessible() => {
                assert_eq!(
                    (to.dtype(), to.len()),
                    (E::DTYPE, from.len()),
                    "{to:?} written from host memory"
                );
                cuda.write(to.address(), View::of(from).host_bytes());
            }
            Backend::Cpu(_) | Backend::Cuda(_) => to.host::<E>().copy_from_slice(from),
        }
    }

    /// Copies to the host. Waits for all operations issued before, unless `from` is in host memory.
    pub fn read<E: Element>(&self, from: View<'_>, to: &mut [E]) {
        match &self.0.backend {
            Backend::Cuda(cuda) if !from.location().is_host_accessible() => {
                assert_eq!(
                    (from.dtype(), from.len()),
                    (E::DTYPE, to.len()),
                    "{from:?} read into host memory"
                );
                cuda.read(from.address(), ViewMut::of(to).host_bytes());
            }
            Backend::Cpu(_) | Backend::Cuda(_) => to.copy_from_slice(from.host::<E>()),
        }
    }

    /// A copy of the elements on the host. Waits like [`Device::read`].
    pub fn to_vec<E: Element>(&self, from: View<'_>) -> Vec<E> {
        let mut to = vec![E::default(); from.len()];
        self.read(from, &mut to);
        to
    }

    /// Waits until all operations issued so far are complete.
    pub fn synchronize(&self) {
        match &self.0.backend {
            Backend::Cpu(_) => {}
            Backend::Cuda(cuda) => cuda.synchronize(),
        }
    }

    /// Memory that tensors occupy on this device, without offloaded tensors.
    pub fn memory(&self) -> MemoryUsage {
        self.0.pool.usage()
    }

    /// Resets the peaks of `memory` to the current usage.
    pub fn reset_peaks(&self) {
        self.0.pool.reset_peaks();
    }

    /// Time per class of operation.
    pub fn meter(&self) -> &Meter {
        &self.0.meter
    }

    /// Executes an operation on the backend, and measures it while the meter is on.
    fn execute<R>(&self, operation: OpClass, work: impl FnOnce(&Backend) -> R) -> R {
        let Inner { backend, meter, .. } = &*self.0;
        if !meter.is_on() {
            return work(backend);
        }
        let start = self.record();
        let result = work(backend);
        meter.add(operation, start, self.record());
        result
    }
}

/// Evaluates `$body` with `$E` as the Rust type of a floating-point dtype.
macro_rules! with_float {
    ($dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            $crate::Dtype::F32 => {
                type $E = f32;
                $body
            }
            $crate::Dtype::Bf16 => {
                type $E = half::bf16;
                $body
            }
            dtype => panic!("this operation takes f32 or bf16, not {dtype}"),
        }
    };
}
use with_float;
