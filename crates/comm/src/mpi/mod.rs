//! Worlds over an MPI library: the ranks are those that `mpirun` or `srun` started, and MPI's collectives
//! perform the calls of a group. Chooses no algorithm; the library does.
//!
//! Adds what MPI lacks: members compare their calls before data moves, every wait has a deadline, and the
//! heartbeat runs over separate connections, because MPI waits forever for a stopped rank. See README.md.

mod channel;
mod collectives;
mod communicator;
mod device;
mod handle;
mod join;
mod numbers;
mod request;
mod session;
mod split;
mod staging;
mod supervision;

pub(crate) use channel::Channel;
pub(crate) use collectives::Engine;
pub(crate) use device::{Place, is_cuda_aware};
pub(crate) use session::SessionGuard;
