//! An MPI operation in progress, and waiting for its end without blocking inside the library.
//! Knows nothing about what the operation does.

use super::supervision::Supervision;
use crate::call::error::Result;
use mpi::ffi;
use std::ffi::c_int;
use std::time::{Duration, Instant};

/// The longest sleep between two tests. Bounds the time from an alarm to the error.
const SLICE: Duration = Duration::from_millis(1);
/// Shorter waits yield instead of sleeping.
const MIN_SLEEP: Duration = Duration::from_micros(50);

/// Dropping it does not end the operation: MPI may still use its buffers.
pub(super) struct Request(ffi::MPI_Request);

impl Request {
    /// Starts an operation with the given call.
    pub(super) fn start(
        call: impl FnOnce(*mut ffi::MPI_Request) -> c_int,
    ) -> std::result::Result<Request, String> {
        // SAFETY: a constant of the library.
        let mut request = Request(unsafe { ffi::RSMPI_REQUEST_NULL });
        succeeded(call(&raw mut request.0))?;
        Ok(request)
    }

    /// Whether the operation has ended. The library moves data only inside this call.
    pub(super) fn test(&mut self) -> std::result::Result<bool, String> {
        let mut done = 0;
        // SAFETY: the request is live, or null after its end, which MPI_Test accepts.
        let code =
            unsafe { ffi::MPI_Test(&raw mut self.0, &raw mut done, ffi::RSMPI_STATUS_IGNORE) };
        succeeded(code).map(|()| done != 0)
    }

    /// Waits for the end. On an error the operation is abandoned, not ended: its buffers must never be
    /// freed or used again.
    ///
    /// First tests in a loop, then yields between tests, then sleeps for a sixteenth of the time waited so
    /// far: data moves only during tests, so sleeps must be short compared with the operation.
    pub(super) fn wait(mut self, supervision: &Supervision) -> Result<()> {
        let mut test = || self.test().map_err(|what| supervision.failed(what));
        let spin = supervision.spin_policy();
        for _ in 0..spin.spins {
            if test()? {
                return Ok(());
            }
        }
        let start = Instant::now();
        while !test()? {
            let pause = start.elapsed() / 16;
            if pause < MIN_SLEEP {
                std::thread::yield_now();
            } else {
                supervision.check()?;
                std::thread::sleep(pause.min(SLICE));
            }
        }
        Ok(())
    }
}

/// Converts an MPI error code; the error is the text of the library.
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
    Err(format!("MPI error: {}", String::from_utf8_lossy(text)))
}
