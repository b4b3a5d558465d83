//! Moves bytes between ranks: worlds, groups and collectives. Knows nothing about axes, tensors or models.
//!
//! ```
//! use lockstep_comm::{on_threads, Op};
//!
//! // Four ranks, each on a thread; the same closure runs in processes, see `World::join`.
//! let means = on_threads(4, |world| {
//!     let mut gradient = vec![world.rank() as f32; 8];
//!     world.all_reduce(&mut gradient, Op::Mean).unwrap();
//!     gradient[0]
//! });
//! assert_eq!(means, [1.5; 4]);
//! ```

mod algo;
mod call;
mod group;
mod health;
mod lane;
mod link;
mod memory;
#[cfg(feature = "mpi")]
mod mpi;
pub mod wire;
mod world;

pub use algo::choose::{
    BufferAccess, CollectiveShape, LinkCost, LinkCosts, candidates, choose, predict_seconds,
    predict_traffic, predict_traffic_with,
};
pub use call::error::{Cause, Error, Failure, Result};
pub use call::fold::Op;
pub use call::partition::shard_range;
pub use call::topology::number_hosts;
pub use call::traffic::Traffic;
pub use call::{Algo, Call, human_bytes};
pub use group::Group;
pub use group::started::Buffer;
pub use group::track::Pending;
pub use health::recorder::FlightEntry;
pub use lockstep_types::{Collective, Dtype, Element, bytes_of, bytes_of_mut};
pub use memory::heap::SharedHeap;
pub use memory::symmetric::Symmetric;
pub use wire::crc32c::crc32c;
pub use world::World;
pub use world::address::listen_ip;
pub use world::identity::{Identity, Launcher, Transport};
pub use world::options::{LocalLinks, Options};
pub use world::threads::{on_threads, on_threads_with, single_rank};
pub use world::token::{self, TokenError, TokenSource};
