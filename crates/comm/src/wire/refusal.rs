//! Why a handshake failed, with both sides' numbers and the way out.
//! Never carries anything of the secret.

use std::fmt;
use std::io;

/// What went wrong, as seen by the side that holds the error: `ours` is this process.
#[derive(Debug)]
pub enum HandshakeError {
    /// The first bytes are not Lockstep's.
    NotLockstep,
    /// Lockstep's magic, and then something no Lockstep writes.
    Malformed(&'static str),
    /// Acceptor: the dialer's proof does not fit.
    WrongSecret,
    /// Dialer: the acceptor hung up on our proof, as it does when the proof does not fit.
    HungUpOnProof,
    /// Dialer: the verdict was not signed with our secret.
    Impostor,
    Version {
        ours: u32,
        theirs: u32,
    },
    /// The peer has not been restarted yet, or never will be.
    PeerIsOlder {
        ours: u32,
        theirs: u32,
    },
    /// The job went on without us.
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
    /// The peer hung up before anything could be said about it.
    Closed,
    TimedOut,
    Io(io::Error),
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use HandshakeError::*;
        match self {
            NotLockstep => f.write_str(
                "the peer does not speak Lockstep; check that the address and port are a rank's",
            ),
            Malformed(what) => write!(
                f,
                "the peer sent a damaged handshake ({what}); run the same Lockstep on every host"
            ),
            WrongSecret => f.write_str(
                "the peer does not know this job's secret; \
                 give every host the same LOCKSTEP_TOKEN",
            ),
            HungUpOnProof => f.write_str(
                "the peer hung up when shown our proof of the job's secret; \
                 give every host the same LOCKSTEP_TOKEN",
            ),
            Impostor => f.write_str(
                "the peer answered without knowing this job's secret; \
                 check that the address is a rank's, and that every host has the same LOCKSTEP_TOKEN",
            ),
            Version { ours, theirs } => write!(
                f,
                "the peer speaks protocol {theirs}, this process {ours}; \
                 run the same Lockstep on every host"
            ),
            PeerIsOlder { ours, theirs } => write!(
                f,
                "the peer is of generation {theirs}, this process of generation {ours}; \
                 stop what is left of the old generation"
            ),
            PeerIsNewer { ours, theirs } => write!(
                f,
                "the peer is of generation {theirs}, this process of generation {ours}; \
                 the job went on without it and it has to stop"
            ),
            ConfigDiffers { ours, theirs } => write!(
                f,
                "the peer's configuration is {theirs:016x}, this process's {ours:016x}; \
                 start every rank from the same run file and overrides"
            ),
            WrongRank { dialed, answered } => write!(
                f,
                "rank {dialed} was dialed but rank {answered} answered; \
                 check that no two ranks were given the same address"
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
            // A socket whose timeout ran out says the one or the other, by platform.
            WouldBlock | TimedOut => HandshakeError::TimedOut,
            _ => HandshakeError::Io(cause),
        }
    }
}
