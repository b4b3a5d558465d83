//! One file per axis of the mesh: what ranks exchange so that all train one model. Acts on buffers and
//! groups; knows no layer names.
//!
//! ```
//! use lockstep_comm::on_threads;
//! use lockstep_kernels::{Device, Dtype, Tag};
//! use lockstep_parallel::Groups;
//! use lockstep_plan::Mesh;
//!
//! // Each of two ranks has a part of a sum; afterwards both have the whole.
//! let mesh = Mesh { tensor: 2, ..Mesh::ONE };
//! let summed = on_threads(2, |world| {
//!     let (device, peers) = (Device::cpu(1), Groups::new(&world, &mesh, false).unwrap());
//!     let mut part = device.empty(1, 2, Dtype::F32, Tag::Buffers);
//!     device.write(part.view_mut(), &[1.0f32, world.rank() as f32]);
//!     let whole = peers.leave(&device, part);
//!     peers.check().unwrap();
//!     let mut host = [0.0f32; 2];
//!     device.read(whole.view(), &mut host);
//!     host
//! });
//! assert_eq!(summed, [[2.0, 1.0]; 2]);
//! ```

mod bucket_job;
pub mod compress;
pub mod context;
mod courier;
mod expert;
mod exposed;
mod floats;
mod gradients;
mod groups;
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
pub use gradients::Gradients;
pub use groups::Groups;
pub use pipeline::{Pipeline, Stream};
pub use reduction::{Reduction, sum};
pub use rows::{Entering, Leaving};
pub use store::{StateLog, Store, StoreOptions};
pub use weights::Weights;
