//! The members of a group as MPI knows them. One communicator per group is enough: MPI keeps messages
//! and collectives apart, and a group's collectives happen one after the other on every member.
//!
//! Communicators are never freed before the library ends: freeing is a collective act, and groups are
//! dropped at different moments on different ranks.

use super::request::succeeded;
use super::session::Session;
use mpi::ffi;
use std::ffi::c_int;
use std::sync::Arc;

#[derive(Clone)]
pub(super) struct Communicator {
    pub raw: Handle,
    /// The library must not end before its last user.
    pub session: Arc<Session>,
}

#[derive(Clone, Copy)]
pub(super) struct Handle(pub ffi::MPI_Comm);

// SAFETY: the library runs at the thread level where every thread may use every handle.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// The same members once more, with traffic of their own. All members call it.
    pub(super) fn duplicate(self) -> Result<Handle, String> {
        made(|new| {
            // SAFETY: a live communicator; the new one is written on success.
            unsafe { ffi::MPI_Comm_dup(self.0, new) }
        })
    }

    /// Members of the same colour form a new communicator, ordered by key; blocks until all members
    /// have called it. Without a colour, none.
    pub(super) fn split(self, colour: Option<c_int>, key: c_int) -> Result<Handle, String> {
        made(|new| {
            // SAFETY: a live communicator; the new one is written on success.
            unsafe {
                let colour = colour.unwrap_or(ffi::RSMPI_UNDEFINED);
                ffi::MPI_Comm_split(self.0, colour, key, new)
            }
        })
    }

    /// Our rank and the number of members.
    pub(super) fn place(self) -> Result<(usize, usize), String> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: a live communicator, and live integers to write to.
        unsafe {
            succeeded(ffi::MPI_Comm_rank(self.0, &raw mut rank))?;
            succeeded(ffi::MPI_Comm_size(self.0, &raw mut size))?;
        }
        Ok((rank as usize, size as usize))
    }
}

fn made(call: impl FnOnce(*mut ffi::MPI_Comm) -> c_int) -> Result<Handle, String> {
    // SAFETY: a constant of the library.
    let mut new = unsafe { ffi::RSMPI_COMM_NULL };
    succeeded(call(&raw mut new))?;
    Ok(Handle(new))
}
