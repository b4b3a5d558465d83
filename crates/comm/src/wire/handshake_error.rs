//! Reasons for a failed handshake, with the values of both sides and a fix. Contains nothing of the secret.

use std::fmt;
use std::io;

use super::message::ENCRYPTED;

/// Error of one side: `ours` is this process.
pub enum HandshakeError {
    /// The first bytes are not Lockstep's.
    NotLockstep,
    /// Lockstep's magic, followed by invalid data.
    Malformed(&'static str),
    /// Acceptor: the dialer's proof is wrong.
    WrongSecret,
    /// Dialer: the acceptor closed the connection after our proof, as it does if the proof is wrong.
    ClosedAfterProof,
    /// Dialer: the verdict was not signed with our secret.
    UnauthenticatedPeer,
    Version {
        ours: u32,
        theirs: u32,
    },
    /// The peer is a process of an older generation.
    PeerIsOlder {
        ours: u32,
        theirs: u32,
    },
    /// The job was restarted without this process.
    PeerIsNewer {
        ours: u32,
        theirs: u32,
    },
    /// The first eight bytes of each configuration's hash.
    ConfigDiffers {
        ours: u64,
        theirs: u64,
    },
    WrongRank {
        dialed: u32,
        answered: u32,
    },
    /// The peer closed the connection before it was authenticated.
    Closed,
    TimedOut,
    Io(io::Error),
}

/// The text of `Display`, which `?` in `main` and `unwrap` then print.
impl fmt::Debug for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use HandshakeError::*;
        match self {
            NotLockstep => f.write_str(
                "the peer is not a Lockstep process; check the address and port",
            ),
            Malformed(what) => write!(
                f,
                "invalid handshake message ({what}); run the same version of Lockstep on every host"
            ),
            WrongSecret => f.write_str(
                "the peer does not know this job's secret; set the same LOCKSTEP_TOKEN on every host",
            ),
            ClosedAfterProof => f.write_str(
                "the peer rejected our proof of the job's secret; \
                 set the same LOCKSTEP_TOKEN on every host",
            ),
            UnauthenticatedPeer => f.write_str(
                "the peer answered without knowing this job's secret; \
                 check the address, and set the same LOCKSTEP_TOKEN on every host",
            ),
            Version { ours, theirs } if ours ^ theirs == ENCRYPTED => {
                let who = match ours & ENCRYPTED {
                    0 => "the peer encrypts its traffic, this process does not",
                    _ => "this process encrypts its traffic, the peer does not",
                };
                write!(f, "{who}; set LOCKSTEP_ENCRYPT=1 (or --encrypt) on all hosts or on none")
            }
            Version { ours, theirs } => write!(
                f,
                "the peer uses protocol {}, this process {}; \
                 run the same version of Lockstep on every host",
                theirs & !ENCRYPTED,
                ours & !ENCRYPTED
            ),
            PeerIsOlder { ours, theirs } => write!(
                f,
                "the peer belongs to generation {theirs}, this process to generation {ours}; \
                 stop the remaining processes of the old generation"
            ),
            PeerIsNewer { ours, theirs } => write!(
                f,
                "the peer belongs to generation {theirs}, this process to generation {ours}; \
                 the job was restarted, so this process must stop"
            ),
            ConfigDiffers { ours, theirs } => write!(
                f,
                "the configuration of the peer is {theirs:016x}, that of this process {ours:016x}; \
                 start every rank with the same run file and overrides"
            ),
            WrongRank { dialed, answered } => write!(
                f,
                "connected to rank {dialed}, but rank {answered} answered; \
                 check that no two ranks have the same address"
            ),
            Closed => f.write_str("the peer closed the connection during the handshake"),
            TimedOut => f.write_str("the peer did not finish the handshake in time"),
            Io(cause) => write!(f, "the handshake failed: {cause}"),
        }
    }
}

impl std::error::Error for HandshakeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            HandshakeError::Io(cause) => Some(cause),
            _ => None,
        }
    }
}

impl From<io::Error> for HandshakeError {
    fn from(cause: io::Error) -> Self {
        use io::ErrorKind::*;
        match cause.kind() {
            UnexpectedEof | ConnectionReset | ConnectionAborted | BrokenPipe | WriteZero => {
                HandshakeError::Closed
            }
            // Depending on the platform, either is returned when a timeout expires.
            WouldBlock | TimedOut => HandshakeError::TimedOut,
            _ => HandshakeError::Io(cause),
        }
    }
}
