//! Waits in the kernel until a socket can move bytes.

use std::os::fd::RawFd;
use std::time::Duration;

/// Sockets that a transfer waits for.
pub(crate) struct SocketWait {
    pub to_write: Option<RawFd>,
    pub to_read: Option<RawFd>,
    /// Whether one direction uses shared memory, which the kernel cannot wait for.
    pub mixed: bool,
}

impl SocketWait {
    /// Sleeps until one of the sockets is ready, for at most `limit`; returns whether one is.
    pub(crate) fn poll(&self, limit: Duration) -> bool {
        let mut fds = [
            libc::pollfd { fd: self.to_write.unwrap_or(-1), events: libc::POLLOUT, revents: 0 },
            libc::pollfd { fd: self.to_read.unwrap_or(-1), events: libc::POLLIN, revents: 0 },
        ];
        let limit = libc::timespec { tv_sec: 0, tv_nsec: i64::from(limit.subsec_nanos()) };
        // SAFETY: two pollfds by address and count; the kernel skips negative descriptors.
        unsafe { libc::ppoll(fds.as_mut_ptr(), 2, &raw const limit, std::ptr::null()) > 0 }
    }
}
