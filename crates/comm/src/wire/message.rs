//! Encoding of the five handshake messages: opening, challenge, proof, verdict, confirmation. Pure functions without I/O,
//! allocation or decisions.
//!
//! Every message has a fixed size and one encoding, so parsers need no length field, and different byte
//! strings have different meanings. All numbers are little-endian.

use std::fmt;

use super::handshake_error::HandshakeError;

/// Version of the messages that follow the handshake. The layout of the opening never changes, so that two
/// versions can report that they differ.
pub const PROTOCOL: u32 = 2;
/// Bit of the version: everything after the handshake is encrypted. Part of the version, because both sides must
/// agree on it, and the proofs cover it.
pub const ENCRYPTED: u32 = 1 << 31;

/// A random number that is used once, which prevents replays of recorded handshakes.
pub type Nonce = [u8; 32];
/// An HMAC-SHA256 tag.
pub type Tag = [u8; 32];

/// Hello: magic (8), version (4), generation (4), configuration (32), from (4), to (4),
/// purpose (4), group (8), lane (4).
pub const HELLO_LEN: usize = 72;
/// Opening: hello (72), the dialer's nonce (32).
pub const OPENING_LEN: usize = HELLO_LEN + 32;
/// Challenge: magic (4), the acceptor's nonce (32).
pub const CHALLENGE_LEN: usize = 36;
/// Proof: magic (4), tag (32).
pub const PROOF_LEN: usize = 36;
/// Verdict: magic (4), code (4), detail (8), tag (32).
pub const VERDICT_LEN: usize = 48;
/// The dialer has received the verdict and uses the connection.
pub const CONFIRMATION: &[u8; 4] = b"LSok";

const HELLO_MAGIC: &[u8; 8] = b"lockstep";
const CHALLENGE_MAGIC: &[u8; 4] = b"LSch";
const PROOF_MAGIC: &[u8; 4] = b"LSpr";
const VERDICT_MAGIC: &[u8; 4] = b"LSvd";

/// Introduction of the dialer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// [`PROTOCOL`] of the dialer, with [`ENCRYPTED`] if it encrypts.
    pub version: u32,
    /// Number of restarts of the job so far.
    pub generation: u32,
    /// Hash of the configuration; equal on all ranks of a run.
    pub config: [u8; 32],
    pub from: u32,
    pub to: u32,
    pub purpose: Purpose,
}

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Rendezvous, heartbeats and aborts; one per rank, to rank 0.
    Control,
    /// Data of one group, sent from the dialer to the acceptor. Lanes are parallel connections.
    Link { group: u64, lane: u32 },
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Purpose::Control => f.write_str("control"),
            Purpose::Link { group, lane } => write!(f, "link of group {group:#x}, lane {lane}"),
        }
    }
}

/// Answer of the acceptor to an authenticated dialer. A rejection carries the acceptor's own value, so that
/// the dialer's error contains both. Variants describe the acceptor: `NewerGeneration` means that the dialer
/// is outdated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Welcome,
    Version { acceptor: u32 },
    OlderGeneration { acceptor: u32 },
    NewerGeneration { acceptor: u32 },
    Config { acceptor: u64 },
    Rank { acceptor: u32 },
}

impl Hello {
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let (tag, group, lane) = match self.purpose {
            Purpose::Control => (0u32, 0, 0),
            Purpose::Link { group, lane } => (1, group, lane),
        };
        let mut out = [0; HELLO_LEN];
        out[..8].copy_from_slice(HELLO_MAGIC);
        out[8..12].copy_from_slice(&self.version.to_le_bytes());
        out[12..16].copy_from_slice(&self.generation.to_le_bytes());
        out[16..48].copy_from_slice(&self.config);
        out[48..52].copy_from_slice(&self.from.to_le_bytes());
        out[52..56].copy_from_slice(&self.to.to_le_bytes());
        out[56..60].copy_from_slice(&tag.to_le_bytes());
        out[60..68].copy_from_slice(&group.to_le_bytes());
        out[68..72].copy_from_slice(&lane.to_le_bytes());
        out
    }
}

/// Parses a hello, without the nonce that follows it in the opening.
pub fn parse_hello(bytes: &[u8]) -> Result<Hello, HandshakeError> {
    let bytes: &[u8; HELLO_LEN] = sized(bytes)?;
    expect_magic(bytes, HELLO_MAGIC)?;
    let (group, lane) = (u64_at(bytes, 60), u32_at(bytes, 68));
    let purpose = match u32_at(bytes, 56) {
        0 if group == 0 && lane == 0 => Purpose::Control,
        1 => Purpose::Link { group, lane },
        _ => return Err(HandshakeError::Malformed("unknown purpose")),
    };
    Ok(Hello {
        version: u32_at(bytes, 8),
        generation: u32_at(bytes, 12),
        config: array_at(bytes, 16),
        from: u32_at(bytes, 48),
        to: u32_at(bytes, 52),
        purpose,
    })
}

pub fn encode_opening(hello: &Hello, nonce: &Nonce) -> [u8; OPENING_LEN] {
    let mut out = [0; OPENING_LEN];
    out[..HELLO_LEN].copy_from_slice(&hello.encode());
    out[HELLO_LEN..].copy_from_slice(nonce);
    out
}

pub fn parse_opening(bytes: &[u8]) -> Result<(Hello, Nonce), HandshakeError> {
    let bytes: &[u8; OPENING_LEN] = sized(bytes)?;
    let hello = parse_hello(&bytes[..HELLO_LEN])?;
    Ok((hello, array_at(bytes, HELLO_LEN)))
}

pub fn encode_challenge(nonce: &Nonce) -> [u8; CHALLENGE_LEN] {
    tagged(CHALLENGE_MAGIC, nonce)
}

pub fn parse_challenge(bytes: &[u8]) -> Result<Nonce, HandshakeError> {
    let bytes: &[u8; CHALLENGE_LEN] = sized(bytes)?;
    expect_magic(bytes, CHALLENGE_MAGIC)?;
    Ok(array_at(bytes, 4))
}

pub fn encode_proof(tag: &Tag) -> [u8; PROOF_LEN] {
    tagged(PROOF_MAGIC, tag)
}

pub fn parse_proof(bytes: &[u8]) -> Result<Tag, HandshakeError> {
    let bytes: &[u8; PROOF_LEN] = sized(bytes)?;
    expect_magic(bytes, PROOF_MAGIC)?;
    Ok(array_at(bytes, 4))
}

impl Verdict {
    /// The signed part of the verdict: code (4), detail (8).
    pub fn body(&self) -> [u8; 12] {
        let (code, detail) = match *self {
            Verdict::Welcome => (0u32, 0),
            Verdict::Version { acceptor } => (1, acceptor.into()),
            Verdict::OlderGeneration { acceptor } => (2, acceptor.into()),
            Verdict::NewerGeneration { acceptor } => (3, acceptor.into()),
            Verdict::Config { acceptor } => (4, acceptor),
            Verdict::Rank { acceptor } => (5, acceptor.into()),
        };
        let mut out = [0; 12];
        out[..4].copy_from_slice(&code.to_le_bytes());
        out[4..].copy_from_slice(&u64::to_le_bytes(detail));
        out
    }
}

pub fn encode_verdict(verdict: &Verdict, tag: &Tag) -> [u8; VERDICT_LEN] {
    let mut out = [0; VERDICT_LEN];
    out[..4].copy_from_slice(VERDICT_MAGIC);
    out[4..16].copy_from_slice(&verdict.body());
    out[16..].copy_from_slice(tag);
    out
}

pub fn parse_verdict(bytes: &[u8]) -> Result<(Verdict, Tag), HandshakeError> {
    let bytes: &[u8; VERDICT_LEN] = sized(bytes)?;
    expect_magic(bytes, VERDICT_MAGIC)?;
    let detail = u64_at(bytes, 8);
    let number = u32::try_from(detail);
    let verdict = match (u32_at(bytes, 4), number) {
        (0, Ok(0)) => Verdict::Welcome,
        (1, Ok(acceptor)) => Verdict::Version { acceptor },
        (2, Ok(acceptor)) => Verdict::OlderGeneration { acceptor },
        (3, Ok(acceptor)) => Verdict::NewerGeneration { acceptor },
        (4, _) => Verdict::Config { acceptor: detail },
        (5, Ok(acceptor)) => Verdict::Rank { acceptor },
        _ => return Err(HandshakeError::Malformed("unknown verdict")),
    };
    Ok((verdict, array_at(bytes, 16)))
}

/// The first bytes of a configuration hash, for messages.
pub(super) fn fingerprint(config: &[u8; 32]) -> u64 {
    u64::from_be_bytes(array_at(config, 0))
}

fn tagged(magic: &[u8; 4], value: &[u8; 32]) -> [u8; 36] {
    let mut out = [0; 36];
    out[..4].copy_from_slice(magic);
    out[4..].copy_from_slice(value);
    out
}

fn sized<const N: usize>(bytes: &[u8]) -> Result<&[u8; N], HandshakeError> {
    bytes.try_into().map_err(|_| HandshakeError::Malformed("wrong size"))
}

fn expect_magic(bytes: &[u8], magic: &[u8]) -> Result<(), HandshakeError> {
    match bytes.starts_with(magic) {
        true => Ok(()),
        false => Err(HandshakeError::NotLockstep),
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}
