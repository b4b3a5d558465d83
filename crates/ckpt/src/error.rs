//! Errors of checkpoints and model folders.

use std::fmt;
use std::path::{Path, PathBuf};

pub type Result<T> = std::result::Result<T, Error>;

pub enum Error {
    /// An I/O error.
    System { doing: &'static str, path: PathBuf, source: std::io::Error },
    /// A file with invalid contents.
    Malformed { path: PathBuf, what: String },
    /// A file or folder with inconsistent contents; lists all problems.
    Invalid { path: PathBuf, problems: Vec<String> },
    /// The target exists already.
    Exists { path: PathBuf },
    /// The path contains no checkpoint.
    NotFound { path: PathBuf },
    /// The run has no checkpoint of this step; lists the existing ones, newest first.
    NoStep { run: PathBuf, step: u64, existing: Vec<u64> },
    /// A corrupt file and the offset of the corruption.
    Corrupt { path: PathBuf, offset: u64, what: String },
    /// Another process uses this run; `None` if its record cannot be read.
    InUse { run: PathBuf, holder: Option<crate::Holder> },
    /// A newer generation trains this run.
    Fenced { run: PathBuf, generation: u64, newest: u64 },
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

    pub(crate) fn corrupt(path: &Path, offset: u64, what: impl Into<String>) -> Error {
        Error::Corrupt { path: path.to_path_buf(), offset, what: what.into() }
    }

    /// Whether the file system or the user's quota is full.
    pub fn is_full(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        matches!(self, Error::System { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded))
    }

    /// The file or folder concerned.
    pub fn path(&self) -> &Path {
        match self {
            Error::System { path, .. }
            | Error::Malformed { path, .. }
            | Error::Invalid { path, .. }
            | Error::Exists { path }
            | Error::NotFound { path }
            | Error::NoStep { run: path, .. }
            | Error::Corrupt { path, .. }
            | Error::InUse { run: path, .. }
            | Error::Fenced { run: path, .. } => path,
        }
    }

    pub(crate) fn malformed(path: &Path, what: impl Into<String>) -> Error {
        Error::Malformed { path: path.to_path_buf(), what: what.into() }
    }
}

/// Fails if there are problems.
pub(crate) fn reject(path: &Path, problems: Vec<String>) -> Result<()> {
    match problems.is_empty() {
        true => Ok(()),
        false => Err(Error::Invalid { path: path.to_path_buf(), problems }),
    }
}

/// Maximum number of problems printed: one missing file can cause hundreds.
const SHOWN: usize = 20;

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
            Error::Malformed { path, what } => write!(f, "{}: {what}", path.display()),
            Error::Invalid { path, problems } => {
                write!(f, "{}:", path.display())?;
                for problem in problems.iter().take(SHOWN) {
                    write!(f, "\n  {problem}")?;
                }
                match problems.len() {
                    n if n > SHOWN => write!(f, "\n  and {} more", n - SHOWN),
                    _ => Ok(()),
                }
            }
            Error::Exists { path } => {
                let path = path.display();
                write!(f, "{path} already exists; remove it or choose another folder")
            }
            Error::NotFound { path } => write!(
                f,
                "no checkpoint in {}: found neither manifest.json nor checkpoints/step-*; pass a run folder or \
                 a checkpoint folder",
                path.display()
            ),
            Error::NoStep { run, step, existing } => {
                let steps: Vec<String> = existing.iter().map(u64::to_string).collect();
                let existing = if steps.is_empty() { "none".into() } else { steps.join(", ") };
                write!(
                    f,
                    "{} has no checkpoint of step {step}; existing steps: {existing}",
                    run.display()
                )
            }
            Error::Corrupt { path, offset, what } => {
                write!(f, "{} is corrupt at byte {offset}: {what}", path.display())
            }
            Error::InUse { run, holder } => {
                let holder =
                    holder.as_ref().map_or("another process".into(), |holder| holder.to_string());
                write!(
                    f,
                    "{0} is in use by {holder}; stop it, or choose another name with --set name=NAME. If it hangs and \
                     cannot be stopped, remove {0}/lock",
                    run.display()
                )
            }
            Error::Fenced { run, generation, newest } => write!(
                f,
                "{}: generation {generation} may not write checkpoints because generation {newest} trains this run now; \
                 stop this process",
                run.display()
            ),
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
