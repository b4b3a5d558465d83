//! What can go wrong between ranks, in words that name the rank, the peer and the act.

use crate::call::Call;
use std::time::Duration;

pub type Result<T> = std::result::Result<T, Error>;

/// Why a world broke. There is one per world: the first that is raised is the one all ranks report.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Failure {
    /// The rank to blame.
    pub guilty: usize,
    pub cause: Cause,
    /// One sentence with the figures.
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u32)]
pub enum Cause {
    /// The process is gone: killed, crashed, or its host.
    Died = 1,
    /// No heartbeat: stopped, or its host is unreachable.
    Silent,
    /// It lives, but did not do its part before the deadline.
    Late,
    /// It made another call than its peers.
    Disagreed,
    /// It left the world by an error of its own.
    Failed,
    /// It left the world in good order, while others still counted on it.
    Left,
}

impl Cause {
    pub(crate) fn from_code(code: u32) -> Option<Cause> {
        use Cause::*;
        [Died, Silent, Late, Disagreed, Failed, Left].into_iter().find(|c| *c as u32 == code)
    }
}

/// An operation or a world that failed.
#[derive(Debug)]
pub enum Error {
    /// A call that did not end well; `failure` says who is to blame and is equal on all survivors.
    Broken {
        rank: usize,
        group: String,
        call: Call,
        /// The rank that was waited for, if it came to waiting.
        peer: Option<usize>,
        waited: Duration,
        failure: Box<Failure>,
    },
    /// The caller's arguments cannot be right, whatever the peers do.
    Misuse { rank: usize, what: String },
    /// The world could not be formed.
    Join { rank: usize, what: String },
    /// The operating system refused something.
    System { rank: usize, doing: String, source: std::io::Error },
}

impl Error {
    pub(crate) fn system(rank: usize, doing: impl Into<String>, source: std::io::Error) -> Error {
        Error::System { rank, doing: doing.into(), source }
    }

    /// The rank to blame, where one is known.
    pub fn guilty(&self) -> Option<usize> {
        match self {
            Error::Broken { failure, .. } => Some(failure.guilty),
            _ => None,
        }
    }

    /// Why the world broke, where it did.
    pub fn cause(&self) -> Option<Cause> {
        match self {
            Error::Broken { failure, .. } => Some(failure.cause),
            _ => None,
        }
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
