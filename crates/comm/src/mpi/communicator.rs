//! The MPI communicator of a group. One per group suffices: MPI separates messages from collectives, and a
//! group's collectives run one after the other on every member.
//!
//! Communicators are not freed before the library is finalized: freeing is collective, and groups are
//! dropped at different times on different ranks.

use super::handle::Handle;
use super::session::Session;
use std::sync::Arc;

#[derive(Clone)]
pub(super) struct Communicator {
    pub raw: Handle,
    /// Keeps the library running until its last user is gone.
    pub session: Arc<Session>,
}
