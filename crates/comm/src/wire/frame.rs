//! The frames on a connection once the handshake is done: a fixed header, then the payload.
//! Never interprets a payload, and never allocates for a length it has not checked.

use std::fmt;
use std::io::{self, IoSlice, Read, Write};

/// Magic (3), kind (1), group (8), sequence (8), digest (8), payload length (8); little-endian.
pub const HEADER_LEN: usize = 36;

/// The longest payload of a control frame. Data links state their own limit.
pub const CONTROL_LIMIT: u64 = 1 << 20;

const MAGIC: &[u8; 3] = b"LSf";

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Bytes of a collective.
    Data = 1,
    /// A control message: rendezvous, barriers, what rank 0 and a rank tell each other.
    Message = 2,
    /// "I am alive."
    Heartbeat = 3,
    /// The run is over because something failed; the payload says what.
    Abort = 4,
    /// The sender leaves in peace; an end after it is no failure.
    Goodbye = 5,
}

impl Kind {
    /// Every kind, for those who list them.
    pub const ALL: [Kind; 5] =
        [Kind::Data, Kind::Message, Kind::Heartbeat, Kind::Abort, Kind::Goodbye];
}

/// What stands before each payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    pub kind: Kind,
    /// The group whose call this belongs to.
    pub group: u64,
    /// The call's number in its group.
    pub sequence: u64,
    /// The digest of the call (operation, type, size), so that ranks which call different things
    /// under one number find out.
    pub digest: u64,
    /// Bytes of payload.
    pub len: u64,
}

impl FrameHeader {
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        out[..3].copy_from_slice(MAGIC);
        out[3] = self.kind as u8;
        let numbers = [self.group, self.sequence, self.digest, self.len];
        for (place, number) in out[4..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        out
    }

    /// Reads a header and checks it, the length against `limit` too: what this returns is safe
    /// to make room for.
    pub fn parse(bytes: &[u8; HEADER_LEN], limit: u64) -> Result<FrameHeader, FrameError> {
        if !bytes.starts_with(MAGIC) {
            return Err(FrameError::BadMagic);
        }
        let kind = Kind::ALL.into_iter().find(|&kind| kind as u8 == bytes[3]);
        let kind = kind.ok_or(FrameError::UnknownKind(bytes[3]))?;
        let len = number(bytes, 3);
        if len > limit {
            return Err(FrameError::TooLong { len, limit });
        }
        Ok(FrameHeader {
            kind,
            group: number(bytes, 0),
            sequence: number(bytes, 1),
            digest: number(bytes, 2),
            len,
        })
    }
}

/// The header's number at `index`, counted after magic and kind.
fn number(bytes: &[u8; HEADER_LEN], index: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[4 + 8 * index..12 + 8 * index]);
    u64::from_le_bytes(number)
}

/// Reads one frame whole. For control frames pass [`CONTROL_LIMIT`].
pub fn read_frame(
    stream: &mut impl Read,
    limit: u64,
) -> Result<(FrameHeader, Vec<u8>), FrameError> {
    let header = read_header(stream, limit)?;
    let len = usize::try_from(header.len)
        .map_err(|_| FrameError::TooLong { len: header.len, limit: usize::MAX as u64 })?;
    let mut payload = vec![0; len];
    stream.read_exact(&mut payload).map_err(FrameError::Io)?;
    Ok((header, payload))
}

/// Reads a header only, for a caller that has a place of its own for the payload.
pub fn read_header(stream: &mut impl Read, limit: u64) -> Result<FrameHeader, FrameError> {
    let mut bytes = [0; HEADER_LEN];
    let first = read_some(stream, &mut bytes).map_err(FrameError::Io)?;
    if first == 0 {
        return Err(FrameError::Closed);
    }
    stream.read_exact(&mut bytes[first..]).map_err(FrameError::Io)?;
    FrameHeader::parse(&bytes, limit)
}

/// Writes header and payload as one, so that a small frame is one packet with Nagle's algorithm
/// switched off, and a large payload is not copied for it.
pub fn write_frame(
    stream: &mut impl Write,
    header: &FrameHeader,
    payload: &[u8],
) -> Result<(), FrameError> {
    assert_eq!(
        header.len,
        payload.len() as u64,
        "a frame's header states the length of its payload"
    );
    let bytes = header.encode();
    let mut parts = [IoSlice::new(&bytes), IoSlice::new(payload)];
    let mut parts = &mut parts[..];
    while !parts.is_empty() {
        match stream.write_vectored(parts) {
            Ok(0) => return Err(FrameError::Io(io::ErrorKind::WriteZero.into())),
            Ok(written) => IoSlice::advance_slices(&mut parts, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(FrameError::Io(error)),
        }
    }
    stream.flush().map_err(FrameError::Io)
}

fn read_some(stream: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    loop {
        match stream.read(bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Why no frame could be read or written.
#[derive(Debug)]
pub enum FrameError {
    /// Not the start of a frame: the two sides disagree on where one ends.
    BadMagic,
    UnknownKind(u8),
    TooLong {
        len: u64,
        limit: u64,
    },
    /// The stream ended between two frames. An end inside a frame is `Io` (unexpected end).
    Closed,
    Io(io::Error),
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FrameError::BadMagic => f.write_str("the peer sent something that is not a frame"),
            FrameError::UnknownKind(kind) => write!(
                f,
                "the peer sent a frame of unknown kind {kind}; run the same Lockstep on every host"
            ),
            FrameError::TooLong { len, limit } => write!(
                f,
                "the peer announced a frame of {len} bytes where at most {limit} are taken"
            ),
            FrameError::Closed => f.write_str("the peer closed the connection"),
            FrameError::Io(cause) => write!(f, "the connection failed: {cause}"),
        }
    }
}

impl std::error::Error for FrameError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            FrameError::Io(cause) => Some(cause),
            _ => None,
        }
    }
}
