//! The MPI library in this process: initialized once, with the thread level that lets groups run
//! concurrently, and finalized once, after all ranks have left.

use super::handle::Handle;
use super::numbers::OwnOps;
use super::request::{Request, succeeded};
use crate::health::board::Board;
use mpi::ffi;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Finalizes the library when its last user is gone, if all ranks left normally. After the loss of a rank
/// the library is not finalized, because MPI_Finalize would wait for that rank forever.
pub(super) struct Session {
    pub ops: OwnOps,
    /// All ranks, used only for the final barrier.
    leaving: Handle,
    complete: AtomicBool,
}

// SAFETY: the library runs with MPI_THREAD_MULTIPLE, where every thread may use every handle; the
// operators are only read.
unsafe impl Send for Session {}
// SAFETY: as above.
unsafe impl Sync for Session {}

impl Session {
    /// Initializes the library; also returns the communicator of all ranks.
    pub(super) fn start() -> Result<(Arc<Session>, Handle), String> {
        let mut before = 0;
        // SAFETY: may be called at any time; the result is written to a live integer.
        succeeded(unsafe { ffi::MPI_Initialized(&raw mut before) })?;
        if before != 0 {
            return Err(
                "MPI is already initialized; a process can join only one world over MPI, once"
                    .into(),
            );
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
                "the MPI library provides thread level {granted}, but {needed} \
                 (MPI_THREAD_MULTIPLE) is required; use a build with thread support, or run without \
                 MPI: lockstep launch"
            ));
        }
        // SAFETY: constants of the library. Errors are returned as codes; the default ends the process.
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
            // SAFETY: every user of the library holds the session, so there are no users left.
            unsafe { ffi::MPI_Finalize() };
        }
    }
}

/// A world's hold on the library.
pub(crate) struct SessionGuard(pub(super) Arc<Session>);

impl SessionGuard {
    /// Waits until all ranks leave or the world breaks. Without it a rank that is done would wait inside
    /// MPI_Finalize, where it sees no alarm.
    pub(crate) fn leave(&self, board: &Board) {
        if board.is_broken() {
            return linger();
        }
        // SAFETY: a live communicator that all ranks use for this alone.
        let barrier = Request::start(|r| unsafe { ffi::MPI_Ibarrier(self.0.leaving.0, r) });
        let Ok(mut barrier) = barrier else { return linger() };
        loop {
            match barrier.test() {
                Ok(true) => return self.0.complete.store(true, Ordering::Release),
                Ok(false) if !board.is_broken() => std::thread::sleep(Duration::from_millis(1)),
                _ => return linger(),
            }
        }
    }
}

/// `mpirun` ends all ranks as soon as one exits with an error. Gives the others time to receive the failure
/// and to report it.
fn linger() {
    std::thread::sleep(Duration::from_millis(500));
}
