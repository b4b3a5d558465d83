//! What a checkpoint carries beside tensors: small values that must agree with them, and so are saved with them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Carried {
    /// Damaged samples that were left out since the run's first step.
    pub left_out: u64,
    /// Of an online learner, or of whatever else trains by a loop of its own: as it likes, for instance a
    /// [`Ledger`](crate::rollouts::Ledger). Null in other runs.
    pub learner: Value,
}
