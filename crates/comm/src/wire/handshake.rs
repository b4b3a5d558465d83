//! Mutual authentication at the start of every connection: both sides prove that they know the job's secret
//! and compare version, generation, configuration and rank. Timeouts are up to the stream. If the version says
//! so, both sides then encrypt with keys that they derive from the secret and both nonces.
//!
//! ```text
//! dialer                                    acceptor
//!   hello, nonce d            ──────────▶
//!                             ◀──────────   nonce a, fresh for this connection
//!   HMAC(key, "dial", hello, d, a) ─────▶   verifies; on a mismatch, closes without an answer
//!                             ◀──────────   verdict, HMAC(key, "accept", hello, d, a, verdict)
//!   verifies, accepts the verdict
//!   confirmation              ──────────▶   uses the connection
//! ```
//!
//! Without the confirmation, the acceptor would use a connection that the dialer has given up because the
//! verdict came too late. The dialer does not wait after it, so it costs no round trip.
//!
//! `key` is derived from the secret for the generation that the hello states. So a proof made with an old
//! generation's key proves only membership in that generation, and both sides can still read a rejection
//! that says which of them is outdated.

use std::cmp::Ordering;
use std::fmt;
use std::io::{Read, Write};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::entropy::random_bytes;
use super::handshake_error::HandshakeError;
use super::message::*;
use super::secret::Secret;
use super::stream::SessionKeys;

/// The acceptor's own values, which a dialer must match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expect {
    pub version: u32,
    pub generation: u32,
    pub config: [u8; 32],
    pub rank: u32,
}

/// Authenticates this process and the acceptor at the other end of `stream`.
/// `secret` is the job's, not a generation's. Reads at most 84 bytes, writes 144.
pub fn dial<S: Read + Write>(
    stream: &mut S,
    hello: &Hello,
    secret: &Secret,
) -> Result<Session, HandshakeError> {
    let ours = random_bytes()?;
    send(stream, &encode_opening(hello, &ours))?;

    let theirs = parse_challenge(&receive::<CHALLENGE_LEN>(stream)?)?;
    let transcript = Transcript::new(secret, *hello, ours, theirs);
    send(stream, &encode_proof(&transcript.dialer_tag()))?;

    // An acceptor closes the connection after a wrong proof, so the end of the stream at this point
    // probably means a different secret.
    let verdict = receive::<VERDICT_LEN>(stream).map_err(|error| match error {
        HandshakeError::Closed => HandshakeError::ClosedAfterProof,
        other => other,
    })?;
    let (verdict, tag) = parse_verdict(&verdict)?;
    transcript
        .acceptor_mac(&verdict)
        .verify_slice(&tag)
        .map_err(|_| HandshakeError::UnauthenticatedPeer)?;
    check_verdict(verdict, hello)?;
    send(stream, CONFIRMATION)?;
    Ok(transcript.session(Side::Dialer))
}

/// Authenticates a dialer and checks that it matches `expect`.
/// `secret` is the job's, not a generation's. Reads at most 144 bytes, writes 84.
pub fn accept<S: Read + Write>(
    stream: &mut S,
    expect: &Expect,
    secret: &Secret,
) -> Result<Session, HandshakeError> {
    let proven = authenticate(stream, secret)?;
    answer(stream, &proven, expect)
}

/// The first half of [`accept`]: proves that the dialer belongs to this job. It has received nothing but a
/// random number so far.
pub(super) fn authenticate<S: Read + Write>(
    stream: &mut S,
    secret: &Secret,
) -> Result<Transcript, HandshakeError> {
    let (hello, theirs) = parse_opening(&receive::<OPENING_LEN>(stream)?)?;
    let ours = random_bytes()?;
    send(stream, &encode_challenge(&ours))?;

    let transcript = Transcript::new(secret, hello, theirs, ours);
    let tag = parse_proof(&receive::<PROOF_LEN>(stream)?)?;
    transcript.dialer_mac().verify_slice(&tag).map_err(|_| HandshakeError::WrongSecret)?;
    Ok(transcript)
}

/// The second half of [`accept`]: sends the dialer the verdict and waits for its confirmation.
pub(super) fn answer<S: Read + Write>(
    stream: &mut S,
    transcript: &Transcript,
    expect: &Expect,
) -> Result<Session, HandshakeError> {
    let (verdict, checked) = check_hello(&transcript.hello, expect);
    let sent = send(stream, &encode_verdict(&verdict, &transcript.acceptor_tag(&verdict)));
    // The reason for a rejection is more important than a failure to send it.
    checked?;
    sent?;
    match receive(stream)? == *CONFIRMATION {
        true => Ok(transcript.session(Side::Acceptor)),
        false => Err(HandshakeError::Malformed("no confirmation")),
    }
}

/// A finished handshake.
pub struct Session {
    /// The dialer's introduction.
    pub hello: Hello,
    /// None without encryption.
    pub(super) keys: Option<SessionKeys>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({:?}, encrypted: {})", self.hello, self.keys.is_some())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Dialer,
    Acceptor,
}

/// The messages that both tags cover, and the key of the dialer's generation.
pub(super) struct Transcript {
    key: Secret,
    hello: Hello,
    dialer: Nonce,
    acceptor: Nonce,
}

impl Transcript {
    fn new(secret: &Secret, hello: Hello, dialer: Nonce, acceptor: Nonce) -> Transcript {
        let key = secret.for_generation(hello.generation);
        Transcript { key, hello, dialer, acceptor }
    }

    /// The result for one side. The keys depend on both nonces, so every connection and direction has its own.
    fn session(&self, side: Side) -> Session {
        let hello = self.hello.encode();
        let key = |label: &[u8]| {
            let mac = self.key.mac(&[label, &hello, &self.dialer, &self.acceptor]);
            mac.finalize().into_bytes().into()
        };
        let keys = (self.hello.version & ENCRYPTED != 0).then(|| {
            let (dialer, acceptor) =
                (key(b"lockstep encrypt from dialer "), key(b"lockstep encrypt from acceptor "));
            match side {
                Side::Dialer => SessionKeys { ours: dialer, theirs: acceptor },
                Side::Acceptor => SessionKeys { ours: acceptor, theirs: dialer },
            }
        });
        Session { hello: self.hello, keys }
    }

    // The labels prevent that one side's tag is accepted as the other's.
    fn dialer_mac(&self) -> Hmac<Sha256> {
        let hello = self.hello.encode();
        self.key.mac(&[b"lockstep dial ", &hello, &self.dialer, &self.acceptor])
    }

    fn acceptor_mac(&self, verdict: &Verdict) -> Hmac<Sha256> {
        let (hello, verdict) = (self.hello.encode(), verdict.body());
        self.key.mac(&[b"lockstep accept ", &hello, &self.dialer, &self.acceptor, &verdict])
    }

    fn dialer_tag(&self) -> Tag {
        self.dialer_mac().finalize().into_bytes().into()
    }

    fn acceptor_tag(&self, verdict: &Verdict) -> Tag {
        self.acceptor_mac(verdict).finalize().into_bytes().into()
    }
}

/// The verdict for the dialer and our own result. The generation is checked before configuration and rank,
/// in which a process of another generation may differ legitimately.
fn check_hello(hello: &Hello, expect: &Expect) -> (Verdict, Result<(), HandshakeError>) {
    let generations = hello.generation.cmp(&expect.generation);
    if hello.version != expect.version {
        let (ours, theirs) = (expect.version, hello.version);
        let verdict = Verdict::Version { acceptor: ours };
        (verdict, Err(HandshakeError::Version { ours, theirs }))
    } else if generations == Ordering::Less {
        let (ours, theirs) = (expect.generation, hello.generation);
        let verdict = Verdict::NewerGeneration { acceptor: ours };
        (verdict, Err(HandshakeError::PeerIsOlder { ours, theirs }))
    } else if generations == Ordering::Greater {
        let (ours, theirs) = (expect.generation, hello.generation);
        let verdict = Verdict::OlderGeneration { acceptor: ours };
        (verdict, Err(HandshakeError::PeerIsNewer { ours, theirs }))
    } else if hello.config != expect.config {
        let (ours, theirs) = (fingerprint(&expect.config), fingerprint(&hello.config));
        let verdict = Verdict::Config { acceptor: ours };
        (verdict, Err(HandshakeError::ConfigDiffers { ours, theirs }))
    } else if hello.to != expect.rank {
        let (dialed, answered) = (hello.to, expect.rank);
        let verdict = Verdict::Rank { acceptor: answered };
        (verdict, Err(HandshakeError::WrongRank { dialed, answered }))
    } else {
        (Verdict::Welcome, Ok(()))
    }
}

/// Converts a verdict to the dialer's error.
fn check_verdict(verdict: Verdict, hello: &Hello) -> Result<(), HandshakeError> {
    Err(match verdict {
        Verdict::Welcome => return Ok(()),
        Verdict::Version { acceptor: theirs } => {
            HandshakeError::Version { ours: hello.version, theirs }
        }
        Verdict::OlderGeneration { acceptor: theirs } => {
            HandshakeError::PeerIsOlder { ours: hello.generation, theirs }
        }
        Verdict::NewerGeneration { acceptor: theirs } => {
            HandshakeError::PeerIsNewer { ours: hello.generation, theirs }
        }
        Verdict::Config { acceptor: theirs } => {
            HandshakeError::ConfigDiffers { ours: fingerprint(&hello.config), theirs }
        }
        Verdict::Rank { acceptor: answered } => {
            HandshakeError::WrongRank { dialed: hello.to, answered }
        }
    })
}

fn send(stream: &mut impl Write, message: &[u8]) -> Result<(), HandshakeError> {
    stream.write_all(message)?;
    Ok(stream.flush()?)
}

fn receive<const N: usize>(stream: &mut impl Read) -> Result<[u8; N], HandshakeError> {
    let mut message = [0; N];
    stream.read_exact(&mut message)?;
    Ok(message)
}
