//! Moving bytes between ranks: worlds, groups and the collectives on them.
//! Knows nothing of axes, tensors or models.
//!
//! ```
//! use lockstep_comm::{on_threads, Op};
//!
//! // Four ranks, each on a thread; the same closure runs in processes, see `join`.
//! let means = on_threads(4, |world| {
//!     let mut gradient = vec![world.rank() as f32; 8];
//!     world.all_reduce(&mut gradient, Op::Mean).unwrap();
//!     gradient[0]
//! });
//! assert_eq!(means, [1.5; 4]);
//! ```

mod alarm;
mod algo;
mod arena;
mod bell;
mod blame;
mod board;
mod call;
mod carrier;
mod channel;
mod choose;
mod context;
mod copy;
mod cost;
mod cursors;
mod cut;
mod element;
mod error;
mod fold;
mod group;
mod heap;
mod host;
mod join;
mod lane;
pub mod launch;
mod link;
#[cfg(all(loom, test))]
mod loom_models;
mod measure;
mod messages;
#[cfg(feature = "mpi")]
mod mpi;
mod options;
mod past;
mod pulse;
mod reach;
mod recorder;
mod roll;
mod scratch;
mod segment;
mod socket;
mod sockets;
mod split;
mod stage;
mod started;
mod symmetric;
mod sync;
mod threads;
mod track;
mod vigil;
mod watch;
pub mod wire;
mod word;
mod work;
mod world;

pub use call::{Algo, Call, Kind, human_bytes};
pub use choose::{Constants, LinkCost, Shape, candidates, choose, price, sent, sent_if};
pub use cost::Traffic;
pub use cut::share;
pub use element::{DType, Element, bytes_of, bytes_of_mut};
pub use error::{Cause, Error, Failure, Result};
pub use fold::Op;
pub use group::Group;
pub use heap::SharedHeap;
pub use options::{LocalLinks, Options};
pub use recorder::Entry;
pub use started::Buffer;
pub use symmetric::Symmetric;
pub use threads::{on_threads, on_threads_with};
pub use track::Pending;
pub use world::World;
