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
    /// More samples than allowed were damaged. Nothing was changed by the step.
    Corrupt {
        step: u64,
        /// Left out since the run's first step; none where there was no end of it.
        count: Option<u64>,
        limit: usize,
        /// One of them: the sample, the file, the place.
        what: String,
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
            Error::Corrupt { step, count, limit, what } => {
                let count = count.map_or("countless".to_string(), |count| count.to_string());
                write!(
                    f,
                    "step {step}: {count} damaged samples, and data.max_corrupt allows {limit}; one is {what}. \
                     `lockstep data inspect --check` tells how much of the file is damaged; prepare it anew, \
                     or allow more"
                )
            }
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
