//! Small values that are saved with the tensors so that both always agree.

use serde::{Deserialize, Serialize};
use serde_json::Value;

#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ExtraState {
    /// Corrupt samples skipped since the first step of the run.
    #[serde(alias = "left_out")]
    pub skipped_samples: u64,
    /// Slots of each layer's experts in the last step, layer by layer: the next step balances experts with them. Empty
    /// unless the balance loss is over the global batch.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub expert_slots: Vec<u64>,
    /// State of an online learner or another custom loop, for example a [`Ledger`](crate::rollouts::Ledger). Null in
    /// other runs.
    pub learner: Value,
}
