//! What can be wrong with weights on disk, in words that name the file and the way out.

use std::fmt;
use std::path::{Path, PathBuf};

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug)]
pub enum Error {
    /// The operating system refused something.
    System { doing: &'static str, path: PathBuf, source: std::io::Error },
    /// A file is not what its name says, or only a part of it.
    Malformed { path: PathBuf, what: String },
    /// What a file or folder holds does not fit together; all that was found, at once.
    Mistakes { path: PathBuf, mistakes: Vec<String> },
    /// Something would be overwritten.
    Exists { path: PathBuf },
    /// No checkpoint where one was looked for.
    Nothing { path: PathBuf },
    /// None of that step; the ones that are there, the newest first.
    NoStep { run: PathBuf, step: u64, there: Vec<u64> },
    /// A file is damaged, and where.
    Corrupt { path: PathBuf, offset: u64, what: String },
    /// Somebody newer trains this run.
    Fenced { run: PathBuf, generation: u64, newest: u64 },
}

impl Error {
    /// For `map_err`: what was being done to which file when the system refused.
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

    /// What it is about.
    pub fn path(&self) -> &Path {
        match self {
            Error::System { path, .. }
            | Error::Malformed { path, .. }
            | Error::Mistakes { path, .. }
            | Error::Exists { path }
            | Error::Nothing { path }
            | Error::NoStep { run: path, .. }
            | Error::Corrupt { path, .. }
            | Error::Fenced { run: path, .. } => path,
        }
    }

    pub(crate) fn malformed(path: &Path, what: impl Into<String>) -> Error {
        Error::Malformed { path: path.to_path_buf(), what: what.into() }
    }
}

/// Nothing, or all the mistakes.
pub(crate) fn refuse(path: &Path, mistakes: Vec<String>) -> Result<()> {
    match mistakes.is_empty() {
        true => Ok(()),
        false => Err(Error::Mistakes { path: path.to_path_buf(), mistakes }),
    }
}

/// A long list helps nobody: one missing file misses hundreds of tensors.
const SHOWN: usize = 20;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::System { doing, path, source } => {
                write!(f, "cannot {doing} {}: {source}", path.display())
            }
            Error::Malformed { path, what } => write!(f, "{}: {what}", path.display()),
            Error::Mistakes { path, mistakes } => {
                write!(f, "{}:", path.display())?;
                for mistake in mistakes.iter().take(SHOWN) {
                    write!(f, "\n  {mistake}")?;
                }
                match mistakes.len() {
                    n if n > SHOWN => write!(f, "\n  and {} more", n - SHOWN),
                    _ => Ok(()),
                }
            }
            Error::Exists { path } => {
                let path = path.display();
                write!(f, "{path} is there already; remove it or name another folder")
            }
            Error::Nothing { path } => write!(
                f,
                "no checkpoint in {}: it has neither manifest.json nor checkpoints/step-*; name a run folder or \
                 one of its checkpoints",
                path.display()
            ),
            Error::NoStep { run, step, there } => {
                let steps: Vec<String> = there.iter().map(u64::to_string).collect();
                let there = if steps.is_empty() { "none".into() } else { steps.join(", ") };
                write!(f, "{} has no checkpoint of step {step}; there are {there}", run.display())
            }
            Error::Corrupt { path, offset, what } => {
                write!(f, "{} is damaged at byte {offset}: {what}", path.display())
            }
            Error::Fenced { run, generation, newest } => write!(
                f,
                "{}: generation {generation} may not write checkpoints, generation {newest} trains this run now; \
                 end this one",
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
