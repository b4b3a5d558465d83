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
//!
//! The same on four processes. A launcher tells each process which rank it is (`lockstep-launch` reads what Slurm,
//! torchrun and MPI pass in the environment); here the program starts itself:
//!
//! ```standalone_crate
//! use lockstep_comm::{Identity, Op, Options, World};
//! use std::process::{Child, Command};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let program = std::env::current_exe()?;
//!     if let Ok(place) = std::env::var("PLACE") {
//!         let (rank, port) = place.split_once(' ').ok_or("PLACE is RANK PORT")?;
//!         let identity = Identity::local(rank.parse()?, 4, port.parse()?);
//!         let world = World::join(&identity, &Options::default())?;
//!         let mut gradient = vec![world.rank() as f32; 8];
//!         world.all_reduce(&mut gradient, Op::Mean)?;
//!         assert_eq!(gradient, [1.5; 8]);
//!         return Ok(());
//!     }
//!     // A port that is free now.
//!     let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
//!     let start = |rank| Command::new(&program).env("PLACE", format!("{rank} {port}")).spawn();
//!     let ranks = (0..4).map(start).collect::<Result<Vec<Child>, _>>()?;
//!     for mut rank in ranks {
//!         assert!(rank.wait()?.success());
//!     }
//!     Ok(())
//! }
//! ```
//!
//! Errors name the rank, the peer and the call. Their `Debug` is the same text, so that `?` in `main` prints it.

mod algo;
mod call;
mod device;
mod group;
mod health;
mod lane;
mod link;
mod memory;
#[cfg(feature = "mpi")]
mod mpi;
mod nccl;
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
pub use device::{DeviceGroup, DeviceOptions, DeviceSlice, EngineChoice};
pub use group::Group;
pub use group::started::Buffer;
pub use group::track::Pending;
pub use health::recorder::FlightEntry;
pub use lockstep_types::trace;
pub use lockstep_types::{Collective, DeviceEngine, Dtype, Element, bytes_of, bytes_of_mut};
pub use memory::heap::SharedHeap;
pub use memory::symmetric::Symmetric;
pub use nccl::MessagePeers;
pub use nccl::api::{NcclReport, nccl_report};
pub use wire::crc32c::crc32c;
pub use world::World;
pub use world::address::listen_ip;
pub use world::identity::{Identity, Launcher, Transport};
pub use world::options::{LocalLinks, Options};
pub use world::threads::{on_threads, on_threads_with, single_rank};
pub use world::token::{self, TokenError, TokenSource};
