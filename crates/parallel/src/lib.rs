//! Parallelism, one file per axis of the mesh: the collectives and messages with which ranks train one model. Works on
//! buffers and groups; knows no layer names. Only `collectives.rs` sees the memory of a tensor.
//!
//! ```
//! use lockstep_comm::on_threads;
//! use lockstep_kernels::{Device, Dtype, Tag};
//! use lockstep_parallel::Groups;
//! use lockstep_plan::Mesh;
//!
//! // Each of two ranks has a partial output; afterwards both have the sum.
//! let mesh = Mesh { tensor: 2, ..Mesh::ONE };
//! let sums = on_threads(2, |world| {
//!     let (device, groups) = (Device::cpu(1), Groups::new(&world, &mesh, false).unwrap());
//!     let mut part = device.empty(1, 2, Dtype::F32, Tag::Buffers);
//!     device.write(part.view_mut(), &[1.0f32, world.rank() as f32]);
//!     let sum = groups.reduce_output(&device, part);
//!     groups.check().unwrap();
//!     let mut host = [0.0f32; 2];
//!     device.read(sum.view(), &mut host);
//!     host
//! });
//! assert_eq!(sums, [[2.0, 1.0]; 2]);
//! ```

mod bucket_job;
mod collectives;
pub mod compress;
pub mod context;
mod expert;
mod exposed;
mod gradients;
mod groups;
mod host_gradients;
mod pipeline;
mod reduction;
mod residual;
mod rows;
mod shared_gradients;
mod store;
mod tensor;
mod vocabulary;
mod weights;

pub use expert::Dispatch;
pub use exposed::{ExposedTimes, Waited};
pub use gradients::Gradients;
pub use groups::Groups;
pub use host_gradients::{HostGradients, SharedHostGradients};
pub use lockstep_comm::trace;
pub use pipeline::{MessageShape, Pipeline};
pub use reduction::{Reduction, sum};
pub use rows::{PartialOutput, SequenceGather};
pub use store::{StateLog, Store, StoreOptions};
pub use weights::{HostShard, Storage, Weights};
