//! Errors that end a run.

use std::fmt;
use std::path::PathBuf;

pub enum Error {
    /// A collective failed or a rank was lost.
    Comm(lockstep_comm::Error),
    /// A parameter, activation or gradient is NaN or infinite. The step was not applied.
    NotFinite {
        step: u64,
        rank: usize,
        place: String,
    },
    /// More corrupt samples than `data.max_corrupt`. The step was not applied.
    Corrupt {
        step: u64,
        /// Skipped since the first step of the run; `None` if no intact replacement was found for a sample.
        count: Option<u64>,
        limit: usize,
        /// One of them: sample, file and byte range.
        what: String,
    },
    /// Replicas have different parameters after a step: a machine or link changed bits.
    Diverged {
        step: u64,
        what: String,
    },
    Data(lockstep_data::Error),
    Checkpoint(lockstep_ckpt::Error),
    /// A file of the run folder could not be written.
    Folder {
        path: PathBuf,
        cause: std::io::Error,
    },
    /// Another rank failed; `what` is its error message.
    OtherRank {
        rank: usize,
        what: String,
    },
    /// A tensor did not fit into the memory of the device or of the host.
    OutOfMemory(lockstep_kernels::OutOfMemory),
    /// Settings, data or requests that do not fit together.
    Invalid(String),
}

/// The text of `Display`, which `?` in `main` and `unwrap` then print.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Comm(cause) => cause.fmt(f),
            Error::NotFinite { step, rank, place } => write!(
                f,
                "step {step}: rank {rank}: {place} is not finite; the step was not applied. \
                 Try a lower train.lr, a longer train.warmup or a smaller train.clip"
            ),
            Error::Corrupt { step, count, limit, what } => {
                match count {
                    Some(count) => write!(
                        f,
                        "step {step}: {count} corrupt samples, but data.max_corrupt = {limit}"
                    )?,
                    None => write!(f, "step {step}: no intact sample found")?,
                }
                write!(
                    f,
                    "; for example {what}. Run `lockstep data inspect --check` to see how much of the file is \
                     corrupt, then prepare the file again or raise data.max_corrupt"
                )
            }
            Error::Diverged { step, what } => write!(
                f,
                "step {step}: {what}: a CPU, its memory or the network changed bits. The run can continue from the \
                 newest checkpoint; test the hosts of these ranks. Replicas on different kinds of CPU may differ, too"
            ),
            Error::Data(cause) => cause.fmt(f),
            Error::Checkpoint(cause) => cause.fmt(f),
            Error::Folder { path, cause } => write!(f, "{}: {cause}", path.display()),
            Error::OtherRank { rank, what } => write!(f, "rank {rank}: {what}"),
            Error::OutOfMemory(what) => what.fmt(f),
            Error::Invalid(what) => f.write_str(what),
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
