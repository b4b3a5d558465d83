//! One file per axis of the mesh: what ranks exchange so that all train one model. Acts on buffers and
//! groups; knows no layer names.
//!
//! ```
//! use lockstep_comm::on_threads;
//! use lockstep_kernels::{Device, Dtype, Tag};
//! use lockstep_parallel::data;
//!
//! // Each of three ranks has gradients of its own part of the batch; afterwards all have those of the whole.
//! let summed = on_threads(3, |world| {
//!     let device = Device::cpu(1);
//!     let mut gradient = device.empty(1, 2, Dtype::F32, Tag::Gradients);
//!     device.write(gradient.view_mut(), &[1.0f32, world.rank() as f32]);
//!     data::sum_gradients(&world, [&mut gradient].into_iter()).unwrap();
//!     let mut host = [0.0f32; 2];
//!     device.read(gradient.view(), &mut host);
//!     host
//! });
//! assert_eq!(summed, [[3.0, 3.0]; 3]);
//! ```

pub mod compress;
pub mod data;
