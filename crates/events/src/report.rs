//! What is known of a step: one value, for the terminal and for the files.

use crate::units::{duration, gib, thousands};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// A training step or an evaluation. What is not known is `None`, and is neither printed nor written.
///
/// ```
/// use lockstep_events::StepReport;
/// let report = StepReport { loss: Some(2.34151), lr: Some(3e-4), ..StepReport::of(120, 1000) };
/// assert_eq!(report.to_string(), "step 120/1000 | loss 2.3415 | lr 3.0e-4");
/// ```
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StepReport {
    /// Counted from 1.
    pub step: usize,
    pub steps: usize,
    /// The mean over all tokens of the global batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// The mean over all tokens that were evaluated on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f64>,
    /// Before clipping.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// Of all ranks together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_s: Option<f64>,
    /// Of what the processors could do; 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Share of the step that waited for communication; 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comm_exposed: Option<f64>,
    /// The largest of any rank, up to now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_bytes: Option<u64>,
    /// What the plan said it would be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_planned_bytes: Option<u64>,
    /// Trained on since the run's first step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// Since the run was started, or went on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub elapsed_s: Option<f64>,
    /// What is left; a guess, for the terminal only.
    #[serde(skip)]
    pub eta: Option<Duration>,
    /// Whatever else there is to keep.
    #[serde(flatten)]
    pub more: BTreeMap<String, Value>,
}

impl StepReport {
    /// A step of which nothing is known yet.
    pub fn of(step: usize, steps: usize) -> StepReport {
        StepReport { step, steps, ..StepReport::default() }
    }

    fn memory(&self) -> Option<String> {
        match (self.mem_bytes?, self.mem_planned_bytes) {
            (used, Some(planned)) => Some(format!("mem {}/{} GiB", gib(used), gib(planned))),
            (used, None) => Some(format!("mem {} GiB", gib(used))),
        }
    }
}

/// The step line.
impl fmt::Display for StepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}/{}", self.step, self.steps)?;
        let parts = [
            self.loss.map(|loss| format!("loss {loss:.4}")),
            self.eval_loss.map(|loss| format!("eval loss {loss:.4}")),
            self.grad_norm.map(|norm| format!("grad norm {norm:.3}")),
            self.lr.map(|lr| format!("lr {lr:.1e}")),
            self.tokens_per_s.map(|rate| format!("{} tok/s", thousands(rate))),
            self.mfu.map(|share| format!("mfu {:.1}%", 100.0 * share)),
            self.comm_exposed.map(|share| format!("comm exposed {:.1}%", 100.0 * share)),
            self.memory(),
            self.eta.map(|left| format!("eta {}", duration(left))),
        ];
        parts.into_iter().flatten().try_for_each(|part| write!(f, " | {part}"))
    }
}
