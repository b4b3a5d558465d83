//! The GPUs of a machine. CUDA's libraries are loaded at run time, so that neither building nor running on CPUs needs them.
//!
//! [`loader`] finds the libraries; [`driver`] and [`nvrtc`](mod@nvrtc) declare the functions that are used of them. A
//! [`Gpu`] is an open GPU: its [`Context`] (memory) and its [`Kernels`], compiled by NVRTC on first use and kept on disk.
//! Operations are enqueued on a [`Stream`], and [`StreamEvent`]s order streams and the host;
//! a [`Fence`] orders streams of several ranks.

mod arena;
pub mod cache;
mod check;
mod context;
pub mod driver;
mod error;
mod fence;
mod gpu;
mod graph;
mod launch;
pub mod loader;
mod lost;
pub mod nvlink;
pub mod nvml;
pub mod nvrtc;
mod queues;
mod stream;
mod tensor_map;

pub use arena::Arena;
pub use check::{ARCHITECTURES, check_compiles};
pub use context::{Context, DeviceBuffer, PeerBuffer, PinnedBuffer};
pub use driver::{Address, Handle};
pub use error::{CudaError, Result};
pub use fence::Fence;
pub use gpu::{Gpu, mps_runs};
pub use graph::Graph;
pub use launch::{Arg, Function, Grid, Kernels, Source};
pub use lost::DeviceLost;
pub use nvrtc::Nvrtc;
pub use queues::use_all_queues;
pub use stream::{Stream, StreamEvent};
pub use tensor_map::{Boxes, TensorMap};
