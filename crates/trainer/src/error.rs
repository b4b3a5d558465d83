//! What can end a run.

use std::fmt;
use std::path::PathBuf;

/// Why a run ended before its last step.
#[derive(Debug)]
pub enum Error {
    /// Ranks could not reach each other, or one failed.
    Comm(lockstep_comm::Error),
    /// A gradient is infinite or no number. Nothing was changed by the step.
    NotFinite {
        step: u64,
        rank: usize,
        place: String,
    },
    Data(lockstep_data::Error),
    Checkpoint(lockstep_ckpt::Error),
    /// A file of the run folder could not be written.
    Folder {
        path: PathBuf,
        cause: std::io::Error,
    },
    /// Another rank failed at what it did alone; its own error, in words.
    Elsewhere {
        rank: usize,
        what: String,
    },
    Mistake(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Comm(cause) => cause.fmt(f),
            Error::NotFinite { step, rank, place } => write!(
                f,
                "step {step}: rank {rank}: {place} is not a finite number; the step was not taken. \
                 Try a lower lr, a longer warmup, or a smaller clip"
            ),
            Error::Data(cause) => cause.fmt(f),
            Error::Checkpoint(cause) => cause.fmt(f),
            Error::Folder { path, cause } => write!(f, "{}: {cause}", path.display()),
            Error::Elsewhere { rank, what } => write!(f, "rank {rank}: {what}"),
            Error::Mistake(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Error {}

impl From<lockstep_comm::Error> for Error {
    fn from(cause: lockstep_comm::Error) -> Error {
        Error::Comm(cause)
    }
}

impl From<lockstep_data::Error> for Error {
    fn from(cause: lockstep_data::Error) -> Error {
        Error::Data(cause)
    }
}

impl From<lockstep_ckpt::Error> for Error {
    fn from(cause: lockstep_ckpt::Error) -> Error {
        Error::Checkpoint(cause)
    }
}
