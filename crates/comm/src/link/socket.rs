//! Bytes over a TCP stream without waiting, and the kernel's sleep until some can move.
//! Knows nothing of handshakes (see `wire`) or messages (see `link`).

use crate::memory::channel::GRAIN;
use crate::memory::scratch::Scratch;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

/// Bytes read at a time when they are folded and not kept.
const SCRATCH: usize = 128 << 10;
/// Makes a stream ready for links: no waiting, and no delay of small messages. The kernel sizes the
/// buffers itself, better than any fixed number we tried.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)
}

/// Writes what the kernel takes of `head` and then `body`.
pub(crate) fn write(stream: &mut TcpStream, head: &[u8], body: &[u8]) -> io::Result<usize> {
    let parts = [IoSlice::new(head), IoSlice::new(body)];
    unless_blocked(stream.write_vectored(if head.is_empty() { &parts[1..] } else { &parts }))
}

fn unless_blocked(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}

/// The reading end, with room for bytes that are looked at but not kept.
pub(crate) struct SocketReader {
    stream: TcpStream,
    scratch: Scratch,
    /// Bytes at the start of `scratch` that do not make a whole grain yet.
    kept: usize,
}

impl SocketReader {
    pub(crate) fn new(stream: TcpStream) -> SocketReader {
        SocketReader { stream, scratch: Scratch::new(0), kept: 0 }
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// Reads what is there into `bytes`. The end of the stream is an error: no link ends by itself.
    pub(crate) fn read_into(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        match self.stream.read(bytes) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            result => unless_blocked(result),
        }
    }

    /// Reads what is there of the last `left` bytes of a message, and hands out whole grains of it
    /// (and whatever ends the message). Says how many bytes were handed out.
    pub(crate) fn read_pieces(
        &mut self,
        left: usize,
        take: impl FnOnce(&[u8]),
    ) -> io::Result<usize> {
        if self.scratch.is_empty() {
            self.scratch = Scratch::new(SCRATCH);
        }
        let scratch = &mut self.scratch;
        let want = left.min(SCRATCH);
        let read = match self.stream.read(&mut scratch[self.kept..want]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            result => unless_blocked(result)?,
        };
        let have = self.kept + read;
        let whole = if have == left { have } else { have - have % GRAIN };
        if whole > 0 {
            take(&scratch[..whole]);
            scratch.copy_within(whole..have, 0);
        }
        self.kept = have - whole;
        Ok(whole)
    }
}

/// Sleeps until one of the descriptors can move bytes, or for `limit`; says whether one can.
pub(crate) fn poll(to_write: Option<RawFd>, to_read: Option<RawFd>, limit: Duration) -> bool {
    let mut fds = [
        libc::pollfd { fd: to_write.unwrap_or(-1), events: libc::POLLOUT, revents: 0 },
        libc::pollfd { fd: to_read.unwrap_or(-1), events: libc::POLLIN, revents: 0 },
    ];
    let limit = libc::timespec { tv_sec: 0, tv_nsec: i64::from(limit.subsec_nanos()) };
    // SAFETY: two pollfds by address and count; negative descriptors are skipped by the kernel.
    unsafe { libc::ppoll(fds.as_mut_ptr(), 2, &raw const limit, std::ptr::null()) > 0 }
}
