//! An MPI operation under way, and waiting for its end without ever blocking inside the library.
//! Knows nothing of what the operation does.

use super::oversight::Oversight;
use crate::call::error::Result;
use mpi::ffi;
use std::ffi::c_int;
use std::time::{Duration, Instant};

/// The longest sleep between two looks: what bounds the time from an alarm to the error.
const SLICE: Duration = Duration::from_millis(1);
/// Shorter sleeps are not worth the kernel's timer.
const LEAST_SLEEP: Duration = Duration::from_micros(50);

/// Dropping one does not end the operation: MPI may still use its buffers.
pub(super) struct Request(ffi::MPI_Request);

impl Request {
    /// Starts an operation by the given call.
    pub(super) fn start(
        call: impl FnOnce(*mut ffi::MPI_Request) -> c_int,
    ) -> std::result::Result<Request, String> {
        // SAFETY: a constant of the library.
        let mut request = Request(unsafe { ffi::RSMPI_REQUEST_NULL });
        succeeded(call(&raw mut request.0))?;
        Ok(request)
    }

    /// Whether it is over. This is also where the library moves data.
    pub(super) fn test(&mut self) -> std::result::Result<bool, String> {
        let mut done = 0;
        // SAFETY: the request is live, or null after its end, which is done at once.
        let code =
            unsafe { ffi::MPI_Test(&raw mut self.0, &raw mut done, ffi::RSMPI_STATUS_IGNORE) };
        succeeded(code).map(|()| done != 0)
    }

    /// Waits for the end. On an error the operation is abandoned, not ended: its buffers must never
    /// be freed or used again.
    ///
    /// Looks without a pause first, then yields the processor between looks, then sleeps for a
    /// sixteenth of the time waited so far: data moves only when somebody looks, so a sleep must stay
    /// short beside what the operation takes anyway.
    pub(super) fn wait(mut self, oversight: &Oversight) -> Result<()> {
        let mut look = || self.test().map_err(|what| oversight.failed(what));
        let patience = oversight.patience();
        for _ in 0..patience.spins {
            if look()? {
                return Ok(());
            }
        }
        let start = Instant::now();
        while !look()? {
            let pause = start.elapsed() / 16;
            if pause < LEAST_SLEEP {
                std::thread::yield_now();
            } else {
                oversight.check()?;
                std::thread::sleep(pause.min(SLICE));
            }
        }
        Ok(())
    }
}

/// The library's own words for an error code.
pub(super) fn succeeded(code: c_int) -> std::result::Result<(), String> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    // More than any library's MPI_MAX_ERROR_STRING.
    let mut text = [0u8; 8192];
    let mut len = 0;
    // SAFETY: the buffer is long enough, and the length is written to a live integer.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &raw mut len) };
    let text = &text[..(len.max(0) as usize).min(text.len())];
    Err(format!("the MPI library reports: {}", String::from_utf8_lossy(text)))
}
