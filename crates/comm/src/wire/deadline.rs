//! A TCP stream with a deadline for all reads and writes together, which a slow peer cannot extend, and the
//! options that every connection sets.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Limit of a handshake on both sides. Enough for round trips of 500 ms, and for packets that are lost three
/// times in a row: Linux sends them again after 1, 3 and 7 s.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(15);

/// Reads and writes on `stream` until `deadline`.
pub(super) struct DeadlineStream<'a> {
    pub stream: &'a TcpStream,
    pub deadline: Instant,
}

impl DeadlineStream<'_> {
    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(left),
        }
    }
}

impl Read for DeadlineStream<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(bytes)
    }
}

impl Write for DeadlineStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Sends small messages at once, and lost packets of a quiet connection again at a constant interval instead of
/// a doubling one: a few lost heartbeats in a row must not look like a dead peer.
pub(super) fn tune(stream: &TcpStream) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        let on: libc::c_int = 1;
        let (value, length) = ((&raw const on).cast(), size_of::<libc::c_int>() as libc::socklen_t);
        let (fd, option) = (stream.as_raw_fd(), libc::TCP_THIN_LINEAR_TIMEOUTS);
        // An older kernel may reject the option; it is only an improvement.
        // SAFETY: the descriptor is open, and the value is an int that outlives the call.
        unsafe { libc::setsockopt(fd, libc::IPPROTO_TCP, option, value, length) };
    }
    stream.set_nodelay(true)
}

/// Removes the timeouts of `stream`.
pub(super) fn clear_timeouts(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)
}
