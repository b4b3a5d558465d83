//! Frames on a connection after the handshake: a fixed header, then the payload. Payloads are not interpreted.
//! Lengths and checksums are verified before they are used.

use std::fmt;
use std::io::{self, IoSlice, Read, Write};

use super::crc32c::crc32c;

/// Magic (3), kind (1), group (8), sequence (8), digest (8), payload length (8), checksum of the payload (4),
/// checksum of the header (4); little-endian. The header has its own, so that a wrong length is not waited for.
pub const HEADER_LEN: usize = 44;
/// Header without its checksums.
const FIELDS: usize = 36;

/// Maximum payload of a control frame.
pub const CONTROL_LIMIT: u64 = 1 << 20;

const MAGIC: &[u8; 3] = b"LSf";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// Bytes of a collective.
    Data = 1,
    /// A control message between rank 0 and another rank.
    Message = 2,
    /// The sender is alive.
    Heartbeat = 3,
    /// The run failed; the payload is the failure.
    Abort = 4,
    /// The sender leaves normally; closing the connection after it is not a failure.
    Goodbye = 5,
}

impl FrameKind {
    pub const ALL: [FrameKind; 5] = [
        FrameKind::Data,
        FrameKind::Message,
        FrameKind::Heartbeat,
        FrameKind::Abort,
        FrameKind::Goodbye,
    ];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    pub kind: FrameKind,
    /// The group of the call.
    pub group: u64,
    /// Number of the call in its group.
    pub sequence: u64,
    /// Digest of the call (operation, type, size), to detect ranks that make different calls.
    pub digest: u64,
    /// Length of the payload in bytes.
    pub len: u64,
}

impl FrameHeader {
    /// The header of a payload with this [`crc32c`].
    pub fn encode(&self, checksum: u32) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        out[..3].copy_from_slice(MAGIC);
        out[3] = self.kind as u8;
        let numbers = [self.group, self.sequence, self.digest, self.len];
        for (place, number) in out[4..FIELDS].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        out[FIELDS..FIELDS + 4].copy_from_slice(&checksum.to_le_bytes());
        let own = crc32c(0, &out[..FIELDS + 4]);
        out[FIELDS + 4..].copy_from_slice(&own.to_le_bytes());
        out
    }

    /// Parses and checks a header; returns it and the checksum of the payload. The length is at most `limit`, so it
    /// is safe to allocate.
    pub fn parse(bytes: &[u8; HEADER_LEN], limit: u64) -> Result<(FrameHeader, u32), FrameError> {
        if !bytes.starts_with(MAGIC) {
            return Err(FrameError::BadMagic);
        }
        verify(&bytes[..FIELDS + 4], checksum_at(bytes, FIELDS + 4))?;
        let kind = FrameKind::ALL.into_iter().find(|&kind| kind as u8 == bytes[3]);
        let kind = kind.ok_or(FrameError::UnknownKind(bytes[3]))?;
        let len = number(bytes, 3);
        if len > limit {
            return Err(FrameError::TooLong { len, limit });
        }
        let (group, sequence, digest) = (number(bytes, 0), number(bytes, 1), number(bytes, 2));
        let header = FrameHeader { kind, group, sequence, digest, len };
        Ok((header, checksum_at(bytes, FIELDS)))
    }
}

/// Fails unless received bytes have the checksum with which they were sent.
pub fn verify(bytes: &[u8], sent: u32) -> Result<(), FrameError> {
    match crc32c(0, bytes) {
        received if received == sent => Ok(()),
        received => Err(FrameError::Corrupt { sent, received }),
    }
}

fn checksum_at(bytes: &[u8; HEADER_LEN], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

/// The number at `index` of a header, counted after magic and kind.
fn number(bytes: &[u8; HEADER_LEN], index: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[4 + 8 * index..12 + 8 * index]);
    u64::from_le_bytes(number)
}

/// Reads one frame. For control frames pass [`CONTROL_LIMIT`].
pub fn read_frame(
    stream: &mut impl Read,
    limit: u64,
) -> Result<(FrameHeader, Vec<u8>), FrameError> {
    let bytes = read_header(stream)?;
    let (header, checksum) = FrameHeader::parse(&bytes, limit)?;
    let len = usize::try_from(header.len)
        .map_err(|_| FrameError::TooLong { len: header.len, limit: usize::MAX as u64 })?;
    let mut payload = vec![0; len];
    stream.read_exact(&mut payload).map_err(FrameError::Io)?;
    verify(&payload, checksum)?;
    Ok((header, payload))
}

fn read_header(stream: &mut impl Read) -> Result<[u8; HEADER_LEN], FrameError> {
    let mut bytes = [0; HEADER_LEN];
    let first = read_some(stream, &mut bytes).map_err(FrameError::Io)?;
    if first == 0 {
        return Err(FrameError::Closed);
    }
    stream.read_exact(&mut bytes[first..]).map_err(FrameError::Io)?;
    Ok(bytes)
}

/// Writes header and payload with one vectored write, so that a small frame is one packet and a large
/// payload is not copied.
pub fn write_frame(
    stream: &mut impl Write,
    header: &FrameHeader,
    payload: &[u8],
) -> Result<(), FrameError> {
    assert_eq!(
        header.len,
        payload.len() as u64,
        "the header must contain the length of the payload"
    );
    let bytes = header.encode(crc32c(0, payload));
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

pub enum FrameError {
    /// The data is not the start of a frame.
    BadMagic,
    UnknownKind(u8),
    /// Checksums as sent and of the received bytes.
    Corrupt {
        sent: u32,
        received: u32,
    },
    TooLong {
        len: u64,
        limit: u64,
    },
    /// The stream ended between two frames. An end inside a frame is an `Io` error.
    Closed,
    Io(io::Error),
}

/// The text of `Display`, which `?` in `main` and `unwrap` then print.
impl fmt::Debug for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FrameError::BadMagic => f.write_str("the peer sent data that is not a frame"),
            FrameError::UnknownKind(kind) => write!(
                f,
                "the peer sent a frame of unknown kind {kind}; run the same version of Lockstep on every host"
            ),
            FrameError::Corrupt { sent, received } => write!(
                f,
                "data was corrupted on the way (checksum {sent:08x} was sent, the received bytes have \
                 {received:08x}); check the network cards and cables between the hosts"
            ),
            FrameError::TooLong { len, limit } => {
                write!(f, "the peer announced a frame of {len} bytes; the limit is {limit}")
            }
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
