//! The context axis: which positions of every sequence a rank holds.

use serde::{Deserialize, Serialize};

/// Positions `start..start + len` of every sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Run {
    pub start: usize,
    pub len: usize,
}
