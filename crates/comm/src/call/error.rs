//! Errors of collectives and worlds. Messages name the rank, the peer and the operation.

use crate::call::Call;
use std::time::Duration;

pub type Result<T> = std::result::Result<T, Error>;

/// The reason why a world broke. There is one per world: all ranks report the first that was raised.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Failure {
    /// The rank that caused the failure.
    pub culprit: usize,
    pub cause: Cause,
    /// One sentence with the values.
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u32)]
pub enum Cause {
    /// The process or its host is gone.
    Died = 1,
    /// No heartbeat: the process is stopped, or its host is unreachable.
    Silent,
    /// It is alive, but missed the deadline of a call.
    Late,
    /// It made a different call than its peers.
    Disagreed,
    /// It left the world with an error.
    Failed,
    /// It left the world normally while others still needed it.
    Left,
    /// Its data arrived with a wrong checksum.
    Corrupt,
}

impl Cause {
    pub(crate) fn from_code(code: u32) -> Option<Cause> {
        use Cause::*;
        [Died, Silent, Late, Disagreed, Failed, Left, Corrupt]
            .into_iter()
            .find(|c| *c as u32 == code)
    }
}

pub enum Error {
    /// A call failed because the world broke; `failure` is equal on all surviving ranks.
    Broken {
        rank: usize,
        group: String,
        call: Call,
        /// The rank that the call waited for, if any.
        peer: Option<usize>,
        waited: Duration,
        failure: Box<Failure>,
    },
    /// Invalid arguments.
    Misuse { rank: usize, what: String },
    /// The world could not be formed.
    Join { rank: usize, what: String },
    /// A system call failed.
    System { rank: usize, doing: String, source: std::io::Error },
}

impl Error {
    pub(crate) fn system(rank: usize, doing: impl Into<String>, source: std::io::Error) -> Error {
        Error::System { rank, doing: doing.into(), source }
    }

    /// The rank that caused the failure, if known.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Error::Broken { failure, .. } => Some(failure.culprit),
            _ => None,
        }
    }

    /// Why the world broke, if it did.
    pub fn cause(&self) -> Option<Cause> {
        match self {
            Error::Broken { failure, .. } => Some(failure.cause),
            _ => None,
        }
    }
}

/// The text of `Display`, which `?` in `main` and `unwrap` then print.
impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Broken { rank, group, call, peer, waited, failure } => {
                write!(f, "rank {rank}: {call} in group {group}: ")?;
                if let Some(peer) = peer {
                    write!(f, "waited {:.1} s for rank {peer}: ", waited.as_secs_f64())?;
                }
                write!(f, "{}", failure.text)
            }
            Error::Misuse { rank, what } => write!(f, "rank {rank}: {what}"),
            Error::Join { rank, what } => write!(f, "rank {rank} could not join: {what}"),
            Error::System { rank, doing, source } => write!(f, "rank {rank}: {doing}: {source}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::System { source, .. } => Some(source),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenError;
    use crate::wire::{FrameError, HandshakeError};

    #[test]
    fn a_question_mark_in_main_prints_a_message() {
        let text = "rank 3: rank 9 is out of range".to_string();
        let misuse = Error::Misuse { rank: 3, what: "rank 9 is out of range".into() };
        assert_eq!(format!("{misuse:?}"), text);
        let token = TokenError::Exposed { path: "token".into(), mode: 0o644 };
        let handshake = HandshakeError::WrongRank { dialed: 1, answered: 2 };
        let frame = FrameError::TooLong { len: 7, limit: 6 };
        for (shown, text) in [
            (format!("{token:?}"), token.to_string()),
            (format!("{handshake:?}"), handshake.to_string()),
            (format!("{frame:?}"), frame.to_string()),
        ] {
            assert_eq!(shown, text);
        }
    }
}
