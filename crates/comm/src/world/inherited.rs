//! The listening socket that rank 0 inherits from its launcher.

use std::io;
use std::net::TcpListener;
use std::os::fd::{FromRawFd, RawFd};

/// Takes ownership of an inherited listening socket (`LOCKSTEP_LISTEN_FD`) and marks it close-on-exec. Call once per
/// process.
pub(crate) fn inherited_listener(fd: RawFd) -> io::Result<TcpListener> {
    let mut listening: libc::c_int = 0;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    let value = (&raw mut listening).cast();
    // SAFETY: getsockopt writes at most `length` bytes to `listening`; fcntl accesses no memory.
    let failed = unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN, value, &mut length) == -1
            || libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) == -1
    };
    if failed {
        return Err(io::Error::last_os_error());
    }
    if listening == 0 {
        let text = format!("file descriptor {fd} is not a listening socket");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    // SAFETY: it is an open listening socket, passed to this process by number to be owned by it.
    Ok(unsafe { TcpListener::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::{AsRawFd, IntoRawFd};

    #[test]
    fn takes_over_a_listener_by_number() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let taken = inherited_listener(listener.into_raw_fd()).unwrap();
        assert_eq!(taken.local_addr().unwrap(), address);
    }

    #[test]
    fn rejects_descriptors_that_do_not_listen() {
        let file = File::open("/dev/null").unwrap();
        assert!(inherited_listener(file.as_raw_fd()).is_err());
        assert!(inherited_listener(1_000_000).is_err());
    }
}
