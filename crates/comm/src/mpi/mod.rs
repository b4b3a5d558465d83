//! An MPI library as the engine of a world: the ranks are those that `mpirun` or `srun` started, and
//! its own collectives carry out a group's calls. Never chooses an algorithm; that is the library's.
//!
//! What MPI leaves out is added here: members compare their calls before data moves, every wait has a
//! deadline, and the heartbeat runs beside the library over connections of our own, because MPI waits
//! for a stopped rank for ever. See the README beside this file.

mod collectives;
mod communicator;
mod hold;
mod join;
mod line;
mod numbers;
mod oversight;
mod request;
mod session;
mod split;

pub(crate) use collectives::Engine;
pub(crate) use line::Line;
pub(crate) use session::Stay;
