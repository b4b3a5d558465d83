//! A raw MPI communicator and the operations on it.

use super::request::succeeded;
use mpi::ffi;
use std::ffi::c_int;

#[derive(Clone, Copy)]
pub(super) struct Handle(pub ffi::MPI_Comm);

// SAFETY: the library runs with MPI_THREAD_MULTIPLE, where every thread may use every handle.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// A communicator of the same members with separate traffic. Collective.
    pub(super) fn duplicate(self) -> Result<Handle, String> {
        create(|new| {
            // SAFETY: a live communicator; the new one is written on success.
            unsafe { ffi::MPI_Comm_dup(self.0, new) }
        })
    }

    /// Members of the same color form a new communicator, ordered by key; blocks until all members have
    /// called it. Null without a color.
    pub(super) fn split(self, color: Option<c_int>, key: c_int) -> Result<Handle, String> {
        create(|new| {
            // SAFETY: a live communicator; the new one is written on success.
            unsafe {
                let color = color.unwrap_or(ffi::RSMPI_UNDEFINED);
                ffi::MPI_Comm_split(self.0, color, key, new)
            }
        })
    }

    /// Our rank and the number of members.
    pub(super) fn rank_and_size(self) -> Result<(usize, usize), String> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: a live communicator, and live integers to write to.
        unsafe {
            succeeded(ffi::MPI_Comm_rank(self.0, &raw mut rank))?;
            succeeded(ffi::MPI_Comm_size(self.0, &raw mut size))?;
        }
        Ok((rank as usize, size as usize))
    }
}

fn create(call: impl FnOnce(*mut ffi::MPI_Comm) -> c_int) -> Result<Handle, String> {
    // SAFETY: a constant of the library.
    let mut new = unsafe { ffi::RSMPI_COMM_NULL };
    succeeded(call(&raw mut new))?;
    Ok(Handle(new))
}
