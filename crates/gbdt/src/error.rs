//! Errors of data, parameters, models and training.

use std::fmt;
use std::path::{Path, PathBuf};

pub type Result<T> = std::result::Result<T, Error>;

pub enum Error {
    /// An I/O error.
    System {
        doing: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    /// An invalid value in a file. Line and column count from 1; the column is that of the field.
    Data {
        path: PathBuf,
        line: u64,
        column: u64,
        what: String,
    },
    /// A file with invalid contents.
    File {
        path: PathBuf,
        what: String,
    },
    /// An invalid matrix or an invalid combination of arguments.
    Input(String),
    /// Invalid parameters; lists all problems.
    Params(Vec<String>),
    /// An invalid model document.
    Model(String),
    /// A checkpoint error.
    Checkpoint(lockstep_ckpt::Error),
    Comm(lockstep_comm::Error),
    /// An error of another rank.
    OtherRank {
        rank: usize,
        what: String,
    },
}

impl Error {
    /// For `map_err`: adds the operation and the file.
    pub(crate) fn system(
        doing: &'static str,
        path: &Path,
    ) -> impl FnOnce(std::io::Error) -> Error + use<> {
        let path = path.to_path_buf();
        move |source| Error::System { doing, path, source }
    }

    pub(crate) fn file(path: &Path, what: impl Into<String>) -> Error {
        Error::File { path: path.to_path_buf(), what: what.into() }
    }

    /// Whether the same command may succeed when it is repeated: a machine or a peer may have caused the error.
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Comm(_) | Error::System { .. } | Error::OtherRank { .. } => true,
            Error::Checkpoint(error) => !matches!(error, lockstep_ckpt::Error::Fenced { .. }),
            _ => false,
        }
    }
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
            Error::System { doing, path, source } => {
                write!(f, "cannot {doing} {}: {source}", path.display())
            }
            Error::Data { path, line, column, what } => {
                write!(f, "{}: line {line}, column {column}: {what}", path.display())
            }
            Error::File { path, what } => write!(f, "{}: {what}", path.display()),
            Error::Input(what) | Error::Model(what) => f.write_str(what),
            Error::Params(problems) => match &problems[..] {
                [one] => f.write_str(one),
                many => write!(f, "{} errors:\n  {}", many.len(), many.join("\n  ")),
            },
            Error::Checkpoint(error) => error.fmt(f),
            Error::Comm(error) => error.fmt(f),
            Error::OtherRank { rank, what } => write!(f, "rank {rank}: {what}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::System { source, .. } => Some(source),
            Error::Comm(error) => Some(error),
            Error::Checkpoint(error) => Some(error),
            _ => None,
        }
    }
}

impl From<lockstep_comm::Error> for Error {
    fn from(error: lockstep_comm::Error) -> Error {
        Error::Comm(error)
    }
}

impl From<lockstep_ckpt::Error> for Error {
    fn from(error: lockstep_ckpt::Error) -> Error {
        Error::Checkpoint(error)
    }
}
