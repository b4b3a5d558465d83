//! Transfer of one message between two ranks, over shared memory or TCP: its header, its pieces, and the
//! loop that sends one message and receives another at the same time. Knows nothing about collectives.

pub(crate) mod socket;
pub(crate) mod sockets;

use crate::call::Stamp;
use crate::call::error::{Error, Result};
use crate::health::poll::SocketWait;
use crate::health::watch::Watch;
use crate::link::socket::{SocketReader, WINDOW};
use crate::memory::bell::Bell;
use crate::memory::channel::{Reader, Writer};
use crate::wire::checksum::Checksum;
use crate::wire::crc32c::crc32c;
use crate::wire::{FrameError, WriteHalf};
use std::io;
use std::os::fd::AsRawFd;

/// Length of the message header: checksum of the header (4), checksum of the body (4), stamp of the call (48),
/// length of the body (8).
pub(crate) const HEADER: usize = 64;
/// Checksum of the text `lockstep`, with which that of a header begins: other data is not taken for a header.
const SEED: u32 = 0x617f_e83e;
/// A body over TCP that is longer than this has its checksum behind it, so that it is sent while it is computed.
const LONG: usize = WINDOW;
const TRAILER: usize = 4;

pub(crate) type Header = [u8; HEADER];

pub(crate) fn header(stamp: &Stamp, len: usize, checksum: u32) -> Header {
    let mut header = [0; HEADER];
    let words = stamp.iter().copied().chain([len as u64]);
    for (to, word) in header[8..].chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    header[4..8].copy_from_slice(&checksum.to_le_bytes());
    let own = crc32c(SEED, &header[4..]);
    header[..4].copy_from_slice(&own.to_le_bytes());
    header
}

fn checksum_at(header: &Header, at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| header[at + i]))
}

/// Stamp and length in a header.
fn parse_header(header: &Header) -> (Stamp, u64) {
    let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|j| header[8 * i + j]));
    (std::array::from_fn(|i| word(i + 1)), word(7))
}

/// Fails on all ranks unless the sender of a header is in the same call, with `len` bytes.
pub(crate) fn check_header(watch: &Watch, peer: usize, header: &Header, len: usize) -> Result<()> {
    let expected = (watch.stamp(), len as u64);
    let (sent, received) = (checksum_at(header, 0), crc32c(SEED, &header[4..]));
    if sent != received {
        return Err(watch.corrupt(peer, &FrameError::Corrupt { sent, received }));
    }
    let error = match parse_header(header) {
        theirs if theirs == expected => return Ok(()),
        (stamp, theirs) if stamp == expected.0 => {
            let what = format!("the same, but sends {theirs} bytes, expected {len}");
            watch.disagreement(peer, &what)
        }
        (stamp, _) => watch.differs(peer, &stamp),
    };
    Err(error)
}

/// Sending end of a link to one peer.
pub(crate) enum Tx {
    /// `bell` belongs to the peer.
    Shared {
        writer: Writer,
        bell: BellRef,
    },
    Socket(WriteHalf),
}

/// Receiving end of a link from one peer.
pub(crate) enum Rx {
    Shared { reader: Reader, bell: BellRef },
    Socket(SocketReader),
}

/// A bell in shared memory that outlives the link.
#[derive(Clone, Copy)]
pub(crate) struct BellRef(*const Bell);

// SAFETY: a bell consists of atomics and may be rung from any thread.
unsafe impl Send for BellRef {}

impl BellRef {
    /// # Safety
    /// The memory of the bell must stay mapped for as long as the link exists.
    pub(crate) unsafe fn new(bell: &Bell) -> BellRef {
        BellRef(bell)
    }

    fn ring(self) {
        // SAFETY: guaranteed by the caller of `new`.
        unsafe { &*self.0 }.ring();
    }
}

/// A message that is being sent.
pub(crate) struct Outgoing<'link, 'data> {
    pub peer: usize,
    pub tx: &'link mut Tx,
    pub header: Header,
    pub bytes: &'data [u8],
    sent: usize,
    /// Length of the body whose checksum is known, and the checksum.
    checked: usize,
    checksum: Checksum,
    /// Sent behind a long body.
    trailer: [u8; TRAILER],
}

/// Destination of an incoming message.
pub(crate) enum Inbox<'a> {
    Into(&'a mut [u8]),
    /// Passes the pieces in order, with their offsets. Each piece is aligned for any element type and a
    /// whole number of elements.
    Each {
        len: usize,
        take: &'a mut dyn FnMut(usize, &[u8]),
    },
}

impl Inbox<'_> {
    fn len(&self) -> usize {
        match self {
            Inbox::Into(bytes) => bytes.len(),
            Inbox::Each { len, .. } => *len,
        }
    }
}

/// A message that is being received.
pub(crate) struct Incoming<'link, 'data> {
    pub peer: usize,
    pub rx: &'link mut Rx,
    pub inbox: Inbox<'data>,
    header: Header,
    got: usize,
    /// Checksum of the body so far, and the one behind the body.
    checksum: Checksum,
    trailer: [u8; TRAILER],
}

/// Length of the checksum behind a body.
fn trailer_len(is_socket: bool, body: usize) -> usize {
    if is_socket && body > LONG { TRAILER } else { 0 }
}

impl<'link, 'data> Outgoing<'link, 'data> {
    pub(crate) fn new(
        peer: usize,
        tx: &'link mut Tx,
        watch: &Watch,
        bytes: &'data [u8],
    ) -> Outgoing<'link, 'data> {
        // Memory that ranks share needs no checksum.
        let checked = if matches!(tx, Tx::Socket(_)) { bytes.len().min(LONG) } else { 0 };
        let mut checksum = Checksum::new();
        checksum.update(&bytes[..checked]);
        let in_header = if checked == bytes.len() { checksum.value() } else { 0 };
        let header = header(&watch.stamp(), bytes.len(), in_header);
        let trailer = [0; TRAILER];
        Outgoing { peer, tx, header, bytes, sent: 0, checked, checksum, trailer }
    }

    fn done(&self) -> bool {
        let (is_socket, flushed) = match &self.tx {
            Tx::Shared { .. } => (false, true),
            Tx::Socket(stream) => (true, stream.is_flushed()),
        };
        flushed && self.sent == HEADER + self.bytes.len() + trailer_len(is_socket, self.bytes.len())
    }

    /// Sends as much as possible without waiting; returns whether anything was sent.
    fn advance(&mut self, watch: &Watch) -> Result<bool> {
        let before = self.sent;
        match self.tx {
            Tx::Shared { writer, bell } => {
                if self.sent < HEADER {
                    self.sent += writer.push(&self.header[self.sent..]);
                }
                if self.sent >= HEADER {
                    self.sent += writer.push(&self.bytes[self.sent - HEADER..]);
                }
                if self.sent == HEADER + self.bytes.len() {
                    writer.pad();
                }
                if self.sent > before {
                    bell.ring();
                }
            }
            Tx::Socket(stream) => {
                let len = self.bytes.len();
                let at = self.sent.saturating_sub(HEADER).min(len);
                let ahead = len.min(at + WINDOW);
                if ahead > self.checked {
                    self.checksum.update(&self.bytes[self.checked..ahead]);
                    self.checked = ahead;
                    if ahead == len {
                        self.trailer = self.checksum.value().to_le_bytes();
                    }
                }
                let trailer = match self.checked == len {
                    true => &self.trailer[..trailer_len(true, len)],
                    false => &[],
                };
                let skip = self.sent.saturating_sub(HEADER + len).min(trailer.len());
                let head = &self.header[self.sent.min(HEADER)..];
                let parts = [head, &self.bytes[at..self.checked], &trailer[skip..]];
                self.sent +=
                    socket::write(stream, parts).map_err(|e| broken(watch, self.peer, &e))?;
            }
        }
        Ok(self.sent > before)
    }
}

impl<'link, 'data> Incoming<'link, 'data> {
    pub(crate) fn new(
        peer: usize,
        rx: &'link mut Rx,
        inbox: Inbox<'data>,
    ) -> Incoming<'link, 'data> {
        let (header, trailer) = ([0; HEADER], [0; TRAILER]);
        Incoming { peer, rx, inbox, header, got: 0, checksum: Checksum::new(), trailer }
    }

    fn done(&self) -> bool {
        self.got == self.body_end() + trailer_len(self.is_socket(), self.inbox.len())
    }

    fn body_end(&self) -> usize {
        HEADER + self.inbox.len()
    }

    fn is_socket(&self) -> bool {
        matches!(self.rx, Rx::Socket(_))
    }

    fn advance(&mut self, watch: &Watch) -> Result<bool> {
        let before = self.got;
        if self.got < HEADER {
            self.read_header(watch)?;
        }
        if self.got >= HEADER && self.got < self.body_end() {
            self.read_body(watch)?;
        }
        if self.got >= self.body_end() && !self.done() {
            self.read_trailer(watch)?;
        }
        if self.done() && self.is_socket() {
            self.verify(watch)?;
        }
        if self.got > before
            && self.done()
            && let Rx::Shared { reader, bell } = self.rx
        {
            reader.skip_padding();
            bell.ring();
        }
        Ok(self.got > before)
    }

    fn read_header(&mut self, watch: &Watch) -> Result<()> {
        match self.rx {
            Rx::Shared { reader, .. } => {
                self.got += reader.pull(HEADER, |piece| self.header.copy_from_slice(piece));
            }
            Rx::Socket(socket) => {
                self.got += socket
                    .read_into(&mut self.header[self.got..])
                    .map_err(|e| broken(watch, self.peer, &e))?;
            }
        }
        if self.got < HEADER {
            return Ok(());
        }
        check_header(watch, self.peer, &self.header, self.inbox.len())
    }

    fn read_body(&mut self, watch: &Watch) -> Result<()> {
        let at = self.got - HEADER;
        let left = self.inbox.len() - at;
        match self.rx {
            Rx::Shared { reader, bell } => {
                // At most one piece per turn, so that a long message does not starve the other
                // direction.
                self.got += reader.pull(left, |piece| match &mut self.inbox {
                    Inbox::Into(bytes) => bytes[at..at + piece.len()].copy_from_slice(piece),
                    Inbox::Each { take, .. } => take(at, piece),
                });
                bell.ring();
            }
            Rx::Socket(socket) => {
                let checksum = &mut self.checksum;
                let read = match &mut self.inbox {
                    Inbox::Into(bytes) => socket
                        .read_into(&mut bytes[at..])
                        .inspect(|n| checksum.update(&bytes[at..at + n])),
                    Inbox::Each { take, .. } => socket.read_pieces(left, |piece| {
                        checksum.update(piece);
                        take(at, piece);
                    }),
                };
                self.got += read.map_err(|e| broken(watch, self.peer, &e))?;
            }
        }
        Ok(())
    }

    fn read_trailer(&mut self, watch: &Watch) -> Result<()> {
        let at = self.got - self.body_end();
        if let Rx::Socket(socket) = self.rx {
            let read = socket.read_into(&mut self.trailer[at..]);
            self.got += read.map_err(|e| broken(watch, self.peer, &e))?;
        }
        Ok(())
    }

    /// Fails on all ranks unless the body has the checksum with which it was sent.
    fn verify(&self, watch: &Watch) -> Result<()> {
        let sent = match trailer_len(true, self.inbox.len()) {
            0 => checksum_at(&self.header, 4),
            _ => u32::from_le_bytes(self.trailer),
        };
        match self.checksum.value() {
            received if received == sent => Ok(()),
            received => Err(watch.corrupt(self.peer, &FrameError::Corrupt { sent, received })),
        }
    }
}

/// The error for a failed read or write.
fn broken(watch: &Watch, peer: usize, error: &io::Error) -> Error {
    match error.kind() {
        // Encrypted data that is not what the peer has sent.
        io::ErrorKind::InvalidData => watch.corrupt(peer, error),
        _ => watch.lost(peer, error),
    }
}

/// Sends one message and receives another until both are done; either may be absent. Peers ring `bell`.
pub(crate) fn transfer(
    watch: &Watch,
    bell: &Bell,
    mut out: Option<Outgoing>,
    mut inc: Option<Incoming>,
) -> Result<()> {
    loop {
        let mut moved = false;
        if let Some(message) = &mut out {
            moved |= message.advance(watch)?;
            if message.done() {
                out = None;
            }
        }
        if let Some(message) = &mut inc {
            moved |= message.advance(watch)?;
            if message.done() {
                inc = None;
            }
        }
        match (&out, &inc) {
            (None, None) => return Ok(()),
            _ if moved => {}
            (out, inc) => wait_for_either(watch, bell, out.as_ref(), inc.as_ref())?,
        }
    }
}

/// Sleeps until one of the two messages may be able to make progress.
fn wait_for_either(
    watch: &Watch,
    bell: &Bell,
    out: Option<&Outgoing>,
    inc: Option<&Incoming>,
) -> Result<()> {
    let peer = inc.map(|i| i.peer).or(out.map(|o| o.peer)).expect("at least one message is given");
    let out_ready = || match out.map(|o| &*o.tx) {
        Some(Tx::Shared { writer, .. }) => writer.has_room(),
        _ => false,
    };
    let in_ready = || match inc.map(|i| (&*i.rx, i.inbox.len(), i.got)) {
        Some((Rx::Shared { reader, .. }, len, got)) => {
            reader.has_some(if got < HEADER { HEADER } else { len + HEADER - got })
        }
        _ => false,
    };
    let to_write = match out.map(|o| &*o.tx) {
        Some(Tx::Socket(stream)) => Some(stream.tcp().as_raw_fd()),
        _ => None,
    };
    let to_read = match inc.map(|i| &*i.rx) {
        Some(Rx::Socket(socket)) => Some(socket.fd()),
        _ => None,
    };
    if to_write.is_none() && to_read.is_none() {
        return watch.wait(peer, bell, || out_ready() || in_ready());
    }
    let mixed = (out.is_some() && to_write.is_none()) || (inc.is_some() && to_read.is_none());
    let sockets = SocketWait { to_write, to_read, mixed };
    watch.wait_sockets(peer, &sockets, || out_ready() || in_ready())
}
