//! An error in a run file: its place, what is wrong, and a suggested fix.

use std::fmt;

/// Where a value was set.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Place {
    /// Line of the run file, counted from 1.
    Line(usize),
    /// On the command line, with `--set`.
    Set,
    /// On the command line, with `--layouts`.
    Layouts,
    /// Not set: a default, or a missing value.
    Default,
}

/// An invalid value of a run file.
#[derive(Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// Dotted key, e.g. `model.heads`. Empty if the text is not TOML.
    pub key: String,
    pub place: Place,
    /// The problem with its values: `heads=6 does not divide dim=128`.
    pub message: String,
    /// How to fix it: `use 4 or 8`. May be empty.
    pub suggestion: String,
}

/// `model.heads (line 4): heads=6 does not divide dim=128; use 4 or 8`
/// The text of `Display`, which `?` in `main` and `unwrap` then print.
impl fmt::Debug for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.key.as_str(), self.place) {
            ("", Place::Default) => {}
            ("", place) => write!(f, "{place}: ")?,
            (key, Place::Default) => write!(f, "{key}: ")?,
            (key, place) => write!(f, "{key} ({place}): ")?,
        }
        f.write_str(&self.message)?;
        if self.suggestion.is_empty() { Ok(()) } else { write!(f, "; {}", self.suggestion) }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Line(line) => write!(f, "line {line}"),
            Place::Set => f.write_str("--set"),
            Place::Layouts => f.write_str("--layouts"),
            Place::Default => f.write_str("default"),
        }
    }
}

impl std::error::Error for ConfigError {}
