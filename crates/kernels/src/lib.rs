//! Contiguous tensors on a device and operations on them, forward and backward. Knows nothing about ranks, and
//! allocates nothing in the hot path.
//!
//! ```
//! use lockstep_kernels::{Device, Dtype, Matmul, Tag};
//!
//! let device = Device::cpu(1);
//! let mut x = device.empty(2, 3, Dtype::F32, Tag::Activations);
//! let mut weight = device.empty(2, 3, Dtype::F32, Tag::Parameters); // (out, in)
//! device.write(x.view_mut(), &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
//! device.write(weight.view_mut(), &[1.0f32, 0.0, 0.0, 0.0, 1.0, 1.0]);
//!
//! // A linear layer, and the gradient of its weight, dyᵀ · x.
//! let mut y = device.empty(2, 2, Dtype::F32, Tag::Activations);
//! device.matmul(Matmul::linear(x.view(), weight.view(), y.view_mut()));
//! let mut dw = device.empty(2, 3, Dtype::F32, Tag::Gradients);
//! device.matmul(Matmul::linear_dw(y.view(), x.view(), dw.view_mut()));
//!
//! let mut host = [0.0f32; 4];
//! device.read(y.view(), &mut host);
//! assert_eq!(host, [1.0, 5.0, 4.0, 11.0]);
//! // Memory is counted exactly, by purpose.
//! assert_eq!(device.memory().of(Tag::Activations).now, (2 * 3 + 2 * 2) * 4);
//! drop(y);
//! assert_eq!(device.memory().of(Tag::Activations).now, 2 * 3 * 4);
//! ```
//!
//! Models use [`Device`]. Below it are [`cpu`], vectorized and multithreaded functions over slices, `cuda`, which
//! enqueues them on a GPU, and [`reference`](mod@reference), the same operations as plain f64 loops, which define the
//! results that the fast versions are tested against.

pub mod cpu;
mod cuda;
mod device;
mod dtype;
mod memory;
pub mod reference;
mod team;

pub use cuda::{CudaError, CudaLibrary, CudaReport, OperationCounts};
pub use device::{
    AdamW, AttentionDelta, AttentionOutput, AttentionShape, Capacity, Code, Combine, CrossEntropy,
    DROPPED, Device, DropoutMask, Event, FP8_MULTIPLE, Fp8Cast, Fp8Copies, Fp8Format, Fp8History,
    Fp8Scales, Fp8Source, Fp8Tensor, GroupedMatmul, IGNORED, LogitGradient, LogitShard, Matmul,
    Meter, NormGradients, NormParams, OpClass, OptimizerState, PositionRange, RandomKey,
    RopeScaling, RopeTable, Router, RouterOutput, RouterSaved, RowGroups, SPARE, Scalar,
    SoftmaxStats, Stack, Transfer, VocabShard,
};
pub use dtype::{Dtype, Element, Float};
pub use lockstep_types::DeviceType;
pub use memory::{Location, MemoryUsage, OutOfMemory, Tag, Tensor, Usage, View, ViewMut};
pub use team::Team;
