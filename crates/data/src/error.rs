//! Errors of reading, preparing and writing data.

use crate::tokens::Damage;
use std::fmt;
use std::path::{Path, PathBuf};

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Data that could not be read, prepared or written.
pub enum Error {
    /// An I/O error.
    System { doing: String, source: std::io::Error },
    /// A file of the wrong kind or version, truncated or modified.
    File { path: PathBuf, what: String },
    /// Tokens that were modified after they were written.
    Damaged(Damage),
    /// More invalid rows than `max_bad` allows.
    BadRows { allowed: u64, found: u64, first: Vec<BadRow> },
    /// An invalid request; the message suggests a fix.
    Misuse { what: String },
    /// A feature that was disabled at build time.
    NotBuilt { what: String, feature: &'static str },
}

/// An input row that could not be used.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct BadRow {
    pub file: PathBuf,
    /// Line or table row, counted from 1.
    pub line: u64,
    pub reason: String,
}

impl Error {
    /// For `map_err`: adds the operation and the file.
    pub(crate) fn system(doing: &str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        let doing = format!("{doing} {}", path.display());
        move |source| Error::System { doing, source }
    }

    pub(crate) fn file(path: &Path, what: impl Into<String>) -> Error {
        Error::File { path: path.to_path_buf(), what: what.into() }
    }

    pub(crate) fn misuse(what: impl Into<String>) -> Error {
        Error::Misuse { what: what.into() }
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
            Error::System { doing, source } => write!(f, "{doing}: {source}"),
            Error::File { path, what } => write!(f, "{}: {what}", path.display()),
            Error::Damaged(damage) => {
                write!(
                    f,
                    "{damage}; run `lockstep data inspect --check` and prepare the file again"
                )
            }
            Error::BadRows { allowed, found, first } => {
                let shown: Vec<_> = first.iter().map(BadRow::to_string).collect();
                let shown = shown.join("\n  ");
                let rows = if *found == 1 { "row" } else { "rows" };
                write!(
                    f,
                    "{found} bad {rows}; at most {allowed} are allowed (--max-bad):\n  {shown}"
                )
            }
            Error::Misuse { what } => write!(f, "{what}"),
            Error::NotBuilt { what, feature } => write!(
                f,
                "{what} needs the cargo feature `{feature}`; build with --features {feature}"
            ),
        }
    }
}

impl fmt::Display for BadRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.reason)
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

impl From<Damage> for Error {
    fn from(damage: Damage) -> Error {
        Error::Damaged(damage)
    }
}
