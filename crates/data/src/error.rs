//! What can go wrong with data, in words that name the file, the figures and the way out.

use crate::tokens::Damage;
use std::fmt;
use std::path::{Path, PathBuf};

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Data that could not be read, prepared or written.
#[derive(Debug)]
pub enum Error {
    /// The operating system refused something.
    System { doing: String, source: std::io::Error },
    /// The file is not what it should be: of another kind or version, cut short, or changed.
    File { path: PathBuf, what: String },
    /// Tokens were changed after they were written.
    Damaged(Damage),
    /// More rows than allowed could not be used.
    BadRows { allowed: u64, found: u64, first: Vec<BadRow> },
    /// What was asked for cannot be done, with the way out.
    Misuse { what: String },
    /// The part of the program that this needs was left out when it was built.
    NotBuilt { what: String, feature: &'static str },
}

/// A row of the input that could not be used.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct BadRow {
    pub file: PathBuf,
    /// The line, or the row of a table, from 1.
    pub line: u64,
    pub reason: String,
}

impl Error {
    /// For `map_err`: what was being done, and to which file.
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

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::System { doing, source } => write!(f, "{doing}: {source}"),
            Error::File { path, what } => write!(f, "{}: {what}", path.display()),
            Error::Damaged(damage) => {
                write!(f, "{damage}; see `lockstep data inspect --check`, and prepare it anew")
            }
            Error::BadRows { allowed, found, first } => {
                let shown: Vec<_> = first.iter().map(BadRow::to_string).collect();
                let shown = shown.join("\n  ");
                write!(
                    f,
                    "{found} bad rows, and only {allowed} are allowed (--max-bad):\n  {shown}"
                )
            }
            Error::Misuse { what } => write!(f, "{what}"),
            Error::NotBuilt { what, feature } => write!(
                f,
                "{what} needs the cargo feature `{feature}`, which this program was built without; \
                 build it with --features {feature}"
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
