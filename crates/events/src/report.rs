//! The report of a step, for the terminal and for files.

use crate::units::{MemoryUnit, duration, thousands};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// A training step or an evaluation. Unknown values are `None` and are neither printed nor written.
///
/// ```
/// use lockstep_events::StepReport;
/// let report = StepReport { loss: Some(2.34151), lr: Some(3e-4), ..StepReport::of(120, 1000) };
/// assert_eq!(report.to_string(), "step 120/1000 | loss 2.3415 | lr 3.0e-4");
/// ```
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StepReport {
    /// Step number, counted from 1.
    pub step: usize,
    pub steps: usize,
    /// Passes over the training data so far; `None` for an endless source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epoch: Option<f64>,
    /// Mean over the tokens of the global batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Mean over the evaluated tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f64>,
    /// Norm of the global gradient before clipping.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// Tokens per second of all ranks together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_s: Option<f64>,
    /// Model FLOPs utilization, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Exposed communication as a fraction of the step, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comm_exposed: Option<f64>,
    /// Lowest load of an expert in any layer: its slots (tokens × top_k) divided by the mean of the layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_load_min: Option<f64>,
    /// Highest load of an expert in any layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_load_max: Option<f64>,
    /// Highest load in a layer, mean over the layers: 1 if all experts are used evenly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_imbalance: Option<f64>,
    /// Slots dropped because their expert was full, as a fraction of all slots. `None` without a capacity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropped_fraction: Option<f64>,
    /// Peak memory of any rank so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_bytes: Option<u64>,
    /// Planned peak memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_planned_bytes: Option<u64>,
    /// Tokens since the first step of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// Time since the run was started or resumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub elapsed_s: Option<f64>,
    /// Estimated time left; printed only.
    #[serde(skip)]
    pub eta: Option<Duration>,
    /// Additional values.
    #[serde(flatten)]
    pub more: BTreeMap<String, Value>,
}

impl StepReport {
    /// A report without values.
    pub fn of(step: usize, steps: usize) -> StepReport {
        StepReport { step, steps, ..StepReport::default() }
    }

    fn expert_load(&self) -> Option<String> {
        Some(format!("expert load {:.2}-{:.2}", self.expert_load_min?, self.expert_load_max?))
    }

    fn memory(&self) -> Option<String> {
        let used = self.mem_bytes?;
        let unit = MemoryUnit::of(used.max(self.mem_planned_bytes.unwrap_or(0)));
        let planned = self.mem_planned_bytes.map(|planned| format!("/{}", unit.number(planned)));
        Some(format!("mem {}{} {unit}", unit.number(used), planned.unwrap_or_default()))
    }
}

/// The step line.
impl fmt::Display for StepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}/{}", self.step, self.steps)?;
        let parts = [
            self.epoch.map(|epoch| format!("epoch {epoch:.2}")),
            self.loss.map(|loss| format!("loss {loss:.4}")),
            self.eval_loss.map(|loss| format!("eval loss {loss:.4}")),
            self.grad_norm.map(|norm| format!("grad norm {norm:.3}")),
            self.lr.map(|lr| format!("lr {lr:.1e}")),
            self.tokens_per_s.map(|rate| format!("{} tok/s", thousands(rate))),
            self.mfu.map(|share| format!("mfu {:.1}%", 100.0 * share)),
            self.comm_exposed.map(|share| format!("comm exposed {:.1}%", 100.0 * share)),
            self.expert_load(),
            self.expert_imbalance.map(|imbalance| format!("imbalance {imbalance:.2}")),
            self.dropped_fraction.map(|share| format!("dropped {:.1}%", 100.0 * share)),
            self.memory(),
            self.eta.map(|left| format!("eta {}", duration(left))),
        ];
        parts.into_iter().flatten().try_for_each(|part| write!(f, " | {part}"))
    }
}
