//! Nonblocking reads and writes on a connection. Knows nothing about handshakes (see `wire`) or messages
//! (see `link`).

use crate::memory::channel::GRAIN;
use crate::memory::scratch::Scratch;
use crate::wire::{ReadHalf, Stream, WriteHalf};
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};

/// Bytes read at a time when they are passed on in pieces.
const SCRATCH: usize = 128 << 10;
/// Bytes that are read, or checksummed before they are written, at a time: they must still be in the cache when
/// they are used for the second time.
pub(crate) const WINDOW: usize = 256 << 10;

/// Prepares a stream for links: nonblocking, and no delay of small messages. Buffer sizes are left to the
/// kernel, which was faster than every fixed size we measured.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)
}

/// Writes as much of the parts as the kernel accepts. Without any, sends what was accepted but not sent yet.
pub(crate) fn write(stream: &mut WriteHalf, parts: [&[u8]; 3]) -> io::Result<usize> {
    if parts.iter().all(|part| part.is_empty()) {
        return unless_blocked(stream.flush().map(|()| 0));
    }
    let parts = parts.map(IoSlice::new);
    let empty = parts.iter().take_while(|part| part.is_empty()).count();
    unless_blocked(stream.write_vectored(&parts[empty..]))
}

fn unless_blocked(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}

/// Reading end, with a buffer for pieces.
pub(crate) struct SocketReader {
    stream: ReadHalf,
    scratch: Scratch,
    /// Bytes at the start of `scratch` that are less than a whole grain.
    rest: usize,
}

impl SocketReader {
    pub(crate) fn new(stream: Stream) -> SocketReader {
        SocketReader { stream: stream.reader, scratch: Scratch::new(0), rest: 0 }
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.stream.tcp().as_raw_fd()
    }

    /// Reads available data into `bytes`. The end of the stream is an error.
    pub(crate) fn read_into(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let limit = bytes.len().min(WINDOW);
        match self.stream.read(&mut bytes[..limit]) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            result => unless_blocked(result),
        }
    }

    /// Reads available data of the last `left` bytes of a message and passes whole grains of it to `take`;
    /// the end of the message may be shorter. Returns the number of bytes passed.
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
        let read = match self.stream.read(&mut scratch[self.rest..want]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            result => unless_blocked(result)?,
        };
        let have = self.rest + read;
        let whole = if have == left { have } else { have - have % GRAIN };
        if whole > 0 {
            take(&scratch[..whole]);
            scratch.copy_within(whole..have, 0);
        }
        self.rest = have - whole;
        Ok(whole)
    }
}
