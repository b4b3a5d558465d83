//! The report of `lockstep plan` about a run, on the machine that is calibrated on it.

use lockstep_sim::search::Proposal;
use lockstep_sim::{Cluster, report};

use super::calibration::calibrate;
use super::measured::Measured;
use crate::RunFolder;

/// Planned memory, traffic and time of a run as text. None without a plan.
pub fn plan_report(run: &RunFolder, machine: Option<&Cluster>) -> Option<String> {
    let plan = run.plan.as_ref()?;
    let measured = Measured::of(run, plan);
    let known = measured.is_some();
    let measured = measured.unwrap_or(Measured { step: 1.0, ..Measured::default() });
    let calibrated = calibrate(plan, &measured, machine);
    let (cluster, estimate) = (&calibrated.cluster, calibrated.base.clone());
    let text = report::text(&Proposal { plan: plan.clone(), estimate }, cluster);
    // Without a measured step, the times would be those of an arbitrary machine.
    Some(if known { text } else { text.lines().take(3).collect::<Vec<_>>().join("\n") })
}
