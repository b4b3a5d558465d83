//! A connection after its handshake. Reads and writes bytes, encrypted if both sides agreed to; works on blocking
//! and nonblocking sockets.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use super::seal::{Opener, Sealer};

/// Both directions of a connection.
#[derive(Debug)]
pub struct Stream {
    pub reader: ReadHalf,
    pub writer: WriteHalf,
}

#[derive(Debug)]
pub struct ReadHalf {
    tcp: Arc<TcpStream>,
    opener: Option<Box<Opener>>,
}

#[derive(Debug)]
pub struct WriteHalf {
    tcp: Arc<TcpStream>,
    sealer: Option<Box<Sealer>>,
}

/// Keys of the two directions of one connection.
pub(super) struct SessionKeys {
    pub ours: [u8; 32],
    pub theirs: [u8; 32],
}

impl Stream {
    pub(super) fn new(tcp: Arc<TcpStream>, keys: Option<SessionKeys>) -> Stream {
        let (opener, sealer) = match keys {
            Some(keys) => {
                (Some(Box::new(Opener::new(&keys.theirs))), Some(Box::new(Sealer::new(&keys.ours))))
            }
            None => (None, None),
        };
        Stream { reader: ReadHalf { tcp: tcp.clone(), opener }, writer: WriteHalf { tcp, sealer } }
    }

    /// The socket, to set options. Writing to it directly would break an encrypted stream.
    pub fn tcp(&self) -> &TcpStream {
        &self.reader.tcp
    }
}

impl ReadHalf {
    pub fn tcp(&self) -> &TcpStream {
        &self.tcp
    }
}

impl WriteHalf {
    pub fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    /// Whether the kernel has accepted everything that was written.
    pub fn is_flushed(&self) -> bool {
        self.sealer.as_ref().is_none_or(|sealer| sealer.is_flushed())
    }
}

impl Read for ReadHalf {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match &mut self.opener {
            Some(opener) => opener.read(&mut &*self.tcp, bytes),
            None => (&*self.tcp).read(bytes),
        }
    }
}

impl Write for WriteHalf {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.sealer {
            Some(sealer) => sealer.write(&mut &*self.tcp, parts),
            None => (&*self.tcp).write_vectored(parts),
        }
    }

    /// On a nonblocking socket this may have to be repeated, see [`WriteHalf::is_flushed`].
    fn flush(&mut self) -> io::Result<()> {
        match &mut self.sealer {
            Some(sealer) => sealer.flush(&mut &*self.tcp),
            None => Ok(()),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.reader.read(bytes)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.writer.write_vectored(parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

impl AsRawFd for Stream {
    fn as_raw_fd(&self) -> RawFd {
        self.reader.tcp.as_raw_fd()
    }
}
