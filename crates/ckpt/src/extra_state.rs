//! Small values that are saved with the tensors so that both always agree.

use serde::{Deserialize, Serialize};
use serde_json::Value;

#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ExtraState {
    /// Corrupt samples skipped since the first step of the run.
    #[serde(alias = "left_out")]
    pub skipped_samples: u64,
    /// State of an online learner or another custom loop, for example a [`Ledger`](crate::rollouts::Ledger). Null in
    /// other runs.
    pub learner: Value,
}
