//! The MPI library in this process: started once, ended once. It starts with the thread level that
//! lets groups work at the same time, and ends only after all ranks have said that they are done.

use super::communicator::Handle;
use super::numbers::OwnOps;
use super::request::{Request, succeeded};
use crate::health::board::Board;
use mpi::ffi;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Ends the library when its last user is gone, if all ranks left in good order. A library that lost
/// a rank is not ended: that would wait for the lost one for ever.
pub(super) struct Session {
    pub ops: OwnOps,
    /// All ranks, for nothing but the farewell.
    leaving: Handle,
    complete: AtomicBool,
}

// SAFETY: the library runs at the thread level where every thread may use every handle; the
// operations are only read.
unsafe impl Send for Session {}
// SAFETY: as above.
unsafe impl Sync for Session {}

impl Session {
    /// Starts the library; gives the communicator of all ranks, too.
    pub(super) fn start() -> Result<(Arc<Session>, Handle), String> {
        let mut before = 0;
        // SAFETY: may be asked at any time; the answer is written to a live integer.
        succeeded(unsafe { ffi::MPI_Initialized(&raw mut before) })?;
        if before != 0 {
            return Err("MPI was started in this process before; a process joins one world over \
                        MPI, and only once"
                .into());
        }
        // SAFETY: called once, as just checked; MPI allows null for the command line, and the level
        // is written to a live integer.
        let (needed, granted) = unsafe {
            let (needed, mut granted) = (ffi::RSMPI_THREAD_MULTIPLE, 0);
            let null = std::ptr::null_mut();
            succeeded(ffi::MPI_Init_thread(null, null.cast(), needed, &raw mut granted))?;
            (needed, granted)
        };
        if granted < needed {
            return Err(format!(
                "the MPI library grants thread level {granted} where {needed} \
                 (MPI_THREAD_MULTIPLE) is needed; load a build of it with thread support, or run \
                 without MPI: lockstep launch"
            ));
        }
        // SAFETY: constants of the library. Errors come back as codes; the default ends the process.
        let all = unsafe {
            let all = ffi::RSMPI_COMM_WORLD;
            succeeded(ffi::MPI_Comm_set_errhandler(all, ffi::RSMPI_ERRORS_RETURN))?;
            Handle(all)
        };
        let (ops, leaving) = (OwnOps::register()?, all.duplicate()?);
        let session = Session { ops, leaving, complete: AtomicBool::new(false) };
        Ok((Arc::new(session), all.duplicate()?))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.complete.load(Ordering::Acquire) {
            // SAFETY: everybody who uses the library holds the session, and nobody does any more.
            unsafe { ffi::MPI_Finalize() };
        }
    }
}

/// A world's place in the library.
pub(crate) struct Stay(pub(super) Arc<Session>);

impl Stay {
    /// Waits until all ranks leave, however long they work on, or until the world breaks. Without it
    /// a rank that is done would wait inside MPI_Finalize, where no alarm reaches it.
    pub(crate) fn farewell(&self, board: &Board) {
        if board.broken() {
            return linger();
        }
        // SAFETY: a live communicator that all ranks use for this alone.
        let meet = Request::start(|r| unsafe { ffi::MPI_Ibarrier(self.0.leaving.0, r) });
        let Ok(mut meet) = meet else { return linger() };
        loop {
            match meet.test() {
                Ok(true) => return self.0.complete.store(true, Ordering::Release),
                Ok(false) if !board.broken() => std::thread::sleep(Duration::from_millis(1)),
                _ => return linger(),
            }
        }
    }
}

/// `mpirun` ends all ranks as soon as one exits with an error: leaves the others the time to hear of
/// the failure and to report it.
fn linger() {
    std::thread::sleep(Duration::from_millis(500));
}
