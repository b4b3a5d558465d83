//! A mistake in a run file: where it stands, what is wrong, and the way out.

use std::fmt;

/// Where a value was typed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Place {
    /// In the run file, counted from 1.
    Line(usize),
    /// On the command line, with `--set`.
    Set,
    /// On the command line, with `--layouts`.
    Layouts,
    /// Nowhere: a default, or something that is missing.
    Default,
}

/// Something in a run file that cannot be, and what to do about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigError {
    /// Dotted: `model.heads`. Empty for text that is not TOML.
    pub key: String,
    pub place: Place,
    /// With the numbers: `heads=6 does not divide dim=128`.
    pub message: String,
    /// `try 4 or 8`.
    pub suggestion: String,
}

/// `model.heads (line 4): heads=6 does not divide dim=128; try 4 or 8`
impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.key.as_str(), self.place) {
            ("", Place::Default) => {}
            ("", place) => write!(f, "{place}: ")?,
            (key, Place::Default) => write!(f, "{key}: ")?,
            (key, place) => write!(f, "{key} ({place}): ")?,
        }
        write!(f, "{}; {}", self.message, self.suggestion)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Line(line) => write!(f, "line {line}"),
            Place::Set => f.write_str("--set"),
            Place::Layouts => f.write_str("--layouts"),
            Place::Default => f.write_str("not typed"),
        }
    }
}

impl std::error::Error for ConfigError {}
