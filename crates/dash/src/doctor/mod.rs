//! The doctor: reads the folder of a running, finished or crashed run and says what limits the step, what went wrong, and
//! what to do next. Every predicted gain is an estimate of `sim` on a machine description that is calibrated on this run.

mod advice;
mod calibration;
mod candidates;
mod config_of;
mod evidence;
mod failure;
mod failure_class;
mod latency;
mod limits;
mod measured;
mod patterns;
mod plan_report;
mod scaling;
mod text;

pub use advice::{Advice, Rejected};
pub use failure::{FailureKind, MemoryFix, Problem, cheapest_memory_fixes};
pub use failure_class::FailureClass;
pub use latency::CallCost;
pub use limits::{Cause, Confidence, Limit};
pub use measured::Measured;
pub use plan_report::plan_report;
pub use scaling::Scaling;

use lockstep_events::trace::{Timeline, trace_folders};
use lockstep_sim::Cluster;
use serde::Serialize;

use crate::{RunFolder, RunState};

/// The verdict on a run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Diagnosis {
    pub run: String,
    pub state: RunState,
    pub step: usize,
    pub steps: usize,
    /// One sentence.
    pub verdict: String,
    /// Limits of the step, largest share first. The shares add up to 1.
    pub limits: Vec<Limit>,
    /// Recommendations, in the order in which to try them.
    pub advice: Vec<Advice>,
    /// Changes that were considered and are not worth it.
    pub rejected: Vec<Rejected>,
    /// Why the run failed or is stuck.
    pub problem: Option<Problem>,
    pub notes: Vec<String>,
    pub measured: Option<Measured>,
    /// Predicted step time of the calibrated simulator, in seconds.
    pub predicted_step_s: Option<f64>,
    /// Compared with a run of the same model on fewer ranks.
    pub scaling: Option<Scaling>,
}

impl Diagnosis {
    /// Exit code of `lockstep doctor`: 0 nothing is wrong, 2 the run failed, 3 it is stuck.
    pub fn exit_code(&self) -> u8 {
        match self.state {
            RunState::Failed => 2,
            RunState::Stuck => 3,
            _ => 0,
        }
    }
}

/// Diagnoses a run. `machine` describes the machine that it runs on, if known; otherwise a generic one is calibrated.
pub fn diagnose(run: &RunFolder, machine: Option<&Cluster>) -> Diagnosis {
    let (step, steps) = run.progress();
    let timeline = last_timeline(run);
    let trace = timeline.as_ref().map(Timeline::breakdowns);
    let mut measured = run.plan.as_ref().and_then(|plan| Measured::of(run, plan));
    if let Some(measured) = &mut measured {
        measured.call_cost = timeline.as_ref().and_then(latency::call_cost);
    }
    let problem = failure::problem(run, machine);
    let mut diagnosis = Diagnosis {
        run: run.name.clone(),
        state: run.state,
        step,
        steps,
        verdict: String::new(),
        limits: Vec::new(),
        advice: Vec::new(),
        rejected: Vec::new(),
        problem,
        notes: Vec::new(),
        measured: measured.clone(),
        predicted_step_s: None,
        scaling: None,
    };
    if let (Some(plan), Some(measured)) = (&run.plan, &measured) {
        let calibrated = calibration::calibrate(plan, measured, machine);
        diagnosis.limits = limits::limits(plan, measured, trace.as_deref(), &calibrated);
        diagnosis.scaling = scaling::scaling(run, plan, measured);
        diagnosis.predicted_step_s = Some(calibrated.base.step_s);
        let (advice, rejected) = advice::advise(plan, measured, &diagnosis.limits, &calibrated);
        (diagnosis.advice, diagnosis.rejected) = (advice, rejected);
        diagnosis.notes = advice::notes(plan, &diagnosis.limits, &calibrated, trace.is_some());
    }
    if run.metrics.damaged > 0 {
        diagnosis.notes.push(format!(
            "metrics.jsonl has {} damaged line(s), which are ignored",
            run.metrics.damaged
        ));
    }
    diagnosis.verdict = text::verdict(&diagnosis);
    diagnosis
}

fn last_timeline(run: &RunFolder) -> Option<Timeline> {
    Timeline::read(&trace_folders(&run.path).pop()?).ok()
}
