//! The mutual proof that opens every connection: both sides show that they know the job's secret,
//! and agree on version, generation, configuration and rank.
//! Never keeps time (the stream does) and never encrypts: it says who is there, not who listens in.
//!
//! ```text
//! dialer                                    acceptor
//!   hello, nonce d            ──────────▶
//!                             ◀──────────   nonce a, fresh for this connection
//!   HMAC(key, "dial", hello, d, a) ─────▶   verifies; a stranger is hung up on without a word
//!                             ◀──────────   verdict, HMAC(key, "accept", hello, d, a, verdict)
//!   verifies, believes the verdict
//! ```
//!
//! `key` is the secret's key for the generation that the hello states. So a proof made with an
//! old generation's key can only ever say "I am of that old generation", and still both sides can
//! read a refusal that says which of them is behind.

use std::cmp::Ordering;
use std::io::{Read, Write};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::entropy::random_bytes;
use super::message::*;
use super::refusal::HandshakeError;
use super::secret::Secret;

/// What an acceptor is, and so what it wants to hear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expect {
    pub version: u32,
    pub generation: u32,
    pub config: [u8; 32],
    pub rank: u32,
}

/// Introduces this process to the peer at the other end of `stream` and has it prove itself.
/// `secret` is the job's, not a generation's. Reads 84 bytes at most, writes 140.
pub fn dial<S: Read + Write>(
    stream: &mut S,
    hello: &Hello,
    secret: &Secret,
) -> Result<(), HandshakeError> {
    let ours = random_bytes()?;
    send(stream, &encode_opening(hello, &ours))?;

    let theirs = parse_challenge(&receive::<CHALLENGE_LEN>(stream)?)?;
    let talk = Transcript::new(secret, *hello, ours, theirs);
    send(stream, &encode_proof(&talk.dialer_tag()))?;

    // An acceptor that has seen a wrong proof closes and says nothing, so an end here has a
    // likely meaning, where an end before it has none.
    let verdict = receive::<VERDICT_LEN>(stream).map_err(|error| match error {
        HandshakeError::Closed => HandshakeError::HungUpOnProof,
        other => other,
    })?;
    let (verdict, tag) = parse_verdict(&verdict)?;
    talk.acceptor_mac(&verdict).verify_slice(&tag).map_err(|_| HandshakeError::Impostor)?;
    heed(verdict, hello)
}

/// Hears out one dialer. `Ok` is a peer that has proven itself and is who we expect.
/// `secret` is the job's, not a generation's. Reads 140 bytes at most, writes 84.
pub fn accept<S: Read + Write>(
    stream: &mut S,
    expect: &Expect,
    secret: &Secret,
) -> Result<Hello, HandshakeError> {
    let proven = authenticate(stream, secret)?;
    answer(stream, &proven, expect)
}

/// The first half of [`accept`]: after it the dialer is known to be of this job. Until then it
/// has been told nothing but a random number.
pub(super) fn authenticate<S: Read + Write>(
    stream: &mut S,
    secret: &Secret,
) -> Result<Transcript, HandshakeError> {
    let (hello, theirs) = parse_opening(&receive::<OPENING_LEN>(stream)?)?;
    let ours = random_bytes()?;
    send(stream, &encode_challenge(&ours))?;

    let talk = Transcript::new(secret, hello, theirs, ours);
    let tag = parse_proof(&receive::<PROOF_LEN>(stream)?)?;
    talk.dialer_mac().verify_slice(&tag).map_err(|_| HandshakeError::WrongSecret)?;
    Ok(talk)
}

/// The second half of [`accept`]: tells the dialer whether it is the one we expect.
pub(super) fn answer<S: Read + Write>(
    stream: &mut S,
    talk: &Transcript,
    expect: &Expect,
) -> Result<Hello, HandshakeError> {
    let (verdict, judgement) = judge(&talk.hello, expect);
    let sent = send(stream, &encode_verdict(&verdict, &talk.acceptor_tag(&verdict)));
    // The reason to refuse is worth more to our log than a peer that did not wait to hear it.
    judgement?;
    sent?;
    Ok(talk.hello)
}

/// What both tags cover: everything said before the verdict, under the key of the dialer's
/// generation.
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

    // The two labels keep one side's tag from ever being accepted as the other's.
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

/// What to tell the dialer, and what to tell ourselves. Generation comes before configuration and
/// rank: a leftover of another generation may differ in those, and that is not its trouble.
fn judge(hello: &Hello, expect: &Expect) -> (Verdict, Result<(), HandshakeError>) {
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

/// The verdict as the dialer's own error.
fn heed(verdict: Verdict, hello: &Hello) -> Result<(), HandshakeError> {
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
