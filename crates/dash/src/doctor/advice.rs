//! Recommendations: single changes of the run file that remove the present bottleneck, estimated on the calibrated
//! machine. A change that does not fit, or is predicted to gain too little, is not recommended.

use lockstep_plan::{Config, DeviceType, Offload, Plan};
use lockstep_sim::estimate;
use lockstep_types::Dtype;
use serde::Serialize;

use super::calibration::Calibrated;
use super::candidates::{Candidate, candidates};
use super::config_of::config_of;
use super::evidence::{ms, stage_seconds};
use super::limits::{Cause, Limit};
use super::measured::Measured;

/// A change to try.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Advice {
    pub title: String,
    /// Values of `--set` to type; empty if the change is not one of the run file.
    pub sets: Vec<String>,
    /// Predicted fraction of the step that it saves, 0 to 1. None if it cannot be predicted.
    pub gain: Option<f64>,
    pub why: String,
    /// The result of the training changes, not only its speed.
    pub changes_training: bool,
}

/// A change that was considered.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Rejected {
    pub sets: Vec<String>,
    pub why: String,
}

/// Minimum predicted gain of a recommendation. Predictions are less accurate than this for smaller ones.
const MIN_GAIN: f64 = 0.03;
/// The same on a machine that is not described: some changes with a lower predicted gain are slower when applied.
const MIN_GAIN_GENERIC: f64 = 0.1;
/// Minimum share of a bottleneck that is worth a change.
pub(super) const MIN_SHARE: f64 = 0.05;
/// Minimum share of waiting for a core that makes predictions unreliable: it is part of compute and of communication, in a
/// ratio that is not measured.
const BUSY_SHARE: f64 = 0.1;
/// Most recommendations.
const MOST: usize = 6;

impl Advice {
    /// The options to type: `--set comm.overlap=true`.
    pub fn options(&self) -> String {
        let sets: Vec<String> = self.sets.iter().map(|set| format!("--set {set}")).collect();
        sets.join(" ")
    }
}

pub(super) fn advise(
    plan: &Plan,
    measured: &Measured,
    limits: &[Limit],
    calibrated: &Calibrated,
) -> (Vec<Advice>, Vec<Rejected>) {
    let mut advice = without_sets(plan, measured, limits);
    let (mut rejected, mut estimated) = (Vec::new(), Vec::new());
    let min_gain = if calibrated.described { MIN_GAIN } else { MIN_GAIN_GENERIC };
    for candidate in candidates(plan, measured, limits) {
        let Candidate { title, sets, why, changes_training } = candidate;
        // On one host all placements are equal.
        let one_host = calibrated.cluster.per_host >= plan.ranks;
        if one_host && sets.iter().any(|set| set.starts_with("layout.placement")) {
            continue;
        }
        // How much faster bf16 is depends on the instructions of the CPU.
        if !calibrated.described && sets.iter().any(|set| set.starts_with("precision.compute")) {
            let why =
                "its gain on this machine is unknown; `lockstep bench machine` measures it".into();
            rejected.push(Rejected { sets, why });
            continue;
        }
        match gain(plan, &sets, calibrated) {
            Err(why) => rejected.push(Rejected { sets, why }),
            Ok(gain) if gain < min_gain => {
                let why = match gain {
                    gain if gain < 0.0 => format!("predicted to be {:.0}% slower", -100.0 * gain),
                    gain if gain >= MIN_GAIN => format!(
                        "predicted to gain {:.1}%, which is too uncertain; `lockstep bench machine` measures this machine",
                        100.0 * gain
                    ),
                    gain => format!("predicted to gain only {:.1}%", 100.0 * gain),
                };
                rejected.push(Rejected { sets, why });
            }
            Ok(gain) => estimated.push(Advice {
                title: title.into(),
                sets,
                // The rest of the step is not changed by it.
                gain: Some(gain * calibrated.target / measured.step),
                why: why.into(),
                changes_training,
            }),
        }
    }
    // Changes that keep the result of the training come first, then the larger gain.
    estimated.sort_by(|a: &Advice, b: &Advice| {
        let order = a.changes_training.cmp(&b.changes_training);
        order.then(b.gain.unwrap_or(0.0).total_cmp(&a.gain.unwrap_or(0.0)))
    });
    // Of similar changes, the best one is enough.
    let mut seen: Vec<(String, Vec<String>)> = Vec::new();
    estimated.retain(|advice| {
        let new = !seen.iter().any(|(title, sets)| *title == advice.title || *sets == advice.sets);
        seen.push((advice.title.clone(), advice.sets.clone()));
        new
    });
    advice.extend(estimated);
    advice.truncate(MOST);
    (advice, rejected)
}

/// Actions outside the run file, for bottlenecks that no setting removes.
fn without_sets(plan: &Plan, measured: &Measured, limits: &[Limit]) -> Vec<Advice> {
    let mut advice = Vec::new();
    let mut say = |title: String, gain: Option<f64>, why: &str| {
        let (sets, why) = (Vec::new(), why.to_string());
        advice.push(Advice { title, sets, gain, why, changes_training: false });
    };
    for limit in limits.iter().filter(|limit| limit.share >= MIN_SHARE) {
        match &limit.cause {
            Cause::Straggler { rank } => say(
                format!("repair or replace the host of rank {rank}"),
                Some(limit.share),
                "no setting helps while all ranks wait for one of them",
            ),
            Cause::SlowLink { ranks: (one, other) } => say(
                format!("repair or replace the link between the hosts of ranks {one} and {other}"),
                Some(limit.share),
                "all ranks wait for the slowest link; test it with `lockstep bench comm`",
            ),
            Cause::BusyHost => say(
                "stop other processes on the host, or use fewer ranks or threads".into(),
                Some(limit.share),
                "the ranks share their cores with other work",
            ),
            Cause::ExpertImbalance => say(
                "balance the experts: raise model.aux_loss, or set model.balance=batch; lower train.lr if routers \
                 collapse"
                    .into(),
                Some(limit.share),
                "ranks wait for the one with the fullest expert; this changes the result of the training",
            ),
            Cause::Bubble => {
                if let Some((title, gain)) = uneven_stages(plan, measured) {
                    say(
                        title,
                        Some(gain),
                        "all stages wait for the slowest one in every micro-batch",
                    );
                }
            }
            Cause::Data => say(
                "put the token file on faster storage, such as a local disk".into(),
                Some(limit.share),
                "samples are read between the passes; a token file that fits in the page cache costs almost nothing",
            ),
            _ => {}
        }
    }
    let share = limits.iter().find(|limit| limit.cause == Cause::Checkpoint);
    if let Some(share) = share.map(|limit| limit.share).filter(|share| *share >= MIN_SHARE) {
        let every = (plan.checkpoint.every * 4).max(1);
        advice.push(Advice {
            title: "save checkpoints less often".into(),
            sets: vec![format!("checkpoint.every={every}")],
            gain: Some(0.75 * share),
            why: format!(
                "each checkpoint blocks training for {}; a failure then costs up to {every} steps",
                ms(measured.checkpoint * plan.checkpoint.every.max(1) as f64)
            ),
            changes_training: false,
        });
    }
    advice
}

/// How to balance pipeline stages with different numbers of layers, and the time that it saves as a fraction of the step.
fn uneven_stages(plan: &Plan, measured: &Measured) -> Option<(String, f64)> {
    let (layers, stages) = (plan.model.layers, plan.layout.pipe * plan.layout.chunks);
    let seconds = stage_seconds(plan, measured);
    let most = seconds.iter().copied().fold(0.0, f64::max);
    let mean = seconds.iter().sum::<f64>() / seconds.len().max(1) as f64;
    let gain = (most - mean) / measured.step;
    if layers.is_multiple_of(stages) || gain < MIN_GAIN {
        return None;
    }
    let both = |pipe: &usize| layers.is_multiple_of(*pipe) && plan.ranks.is_multiple_of(*pipe);
    let divisors = (2..=plan.ranks).filter(both);
    let near = divisors.min_by_key(|pipe| pipe.abs_diff(plan.layout.pipe));
    let pipe = near.map_or(String::new(), |pipe| format!(", or layout.pipe={pipe}"));
    let title = format!(
        "balance the stages: {layers} layers on {stages} stages; use a multiple of {stages} layers{pipe}"
    );
    Some((title, gain))
}

/// Predicted fraction of the step that the change saves, or why it is impossible.
fn gain(plan: &Plan, sets: &[String], calibrated: &Calibrated) -> Result<f64, String> {
    let changed = changed_plan(plan, sets, calibrated)?;
    let after = estimate(&changed, &calibrated.cluster, &calibrated.options);
    if !after.fits {
        return Err("does not fit in memory".into());
    }
    Ok(1.0 - after.step_s / calibrated.base.step_s)
}

/// The plan with the values of `sets`, checked as if they were typed.
pub(super) fn changed_plan(
    plan: &Plan,
    sets: &[String],
    calibrated: &Calibrated,
) -> Result<Plan, String> {
    let typed = Config::parse("", sets);
    if let Some(error) = typed.errors.first() {
        return Err(error.to_string());
    }
    let mut config = config_of(plan);
    macro_rules! take {
        ($($section:ident . $key:ident),* $(,)?) => {$(
            if typed.$section.$key.is_some() {
                config.$section.$key = typed.$section.$key.clone();
            }
        )*};
    }
    take!(
        train.micro_batch,
        train.global_batch,
        layout.data,
        layout.zero,
        layout.tensor,
        layout.context,
        layout.pipe,
        layout.schedule,
        layout.chunks,
        layout.recompute,
        layout.placement,
        layout.offload,
        precision.compute,
        precision.gradients,
        comm.bucket_mb,
        comm.overlap,
        comm.compression,
        checkpoint.every,
    );
    // The shards and the placement follow the degrees.
    if sets.iter().any(|set| set.starts_with("layout.")) {
        config.layout.shard = None;
        config.layout.placement = typed.layout.placement.clone();
        if typed.layout.zero.is_some_and(|zero| zero < 3) {
            config.layout.keep_gathered = None;
        }
    }
    let environment = calibrated.cluster.environment(plan.ranks, Some(plan.model.vocab));
    Plan::resolve(&config, &environment)
        .map_err(|errors| errors.first().map_or("invalid".into(), ToString::to_string))
}

/// Remarks that belong to the advice.
pub(super) fn notes(
    plan: &Plan,
    limits: &[Limit],
    calibrated: &Calibrated,
    traced: bool,
) -> Vec<String> {
    let mut notes = Vec::new();
    let overhead = |limit: &&Limit| {
        matches!(limit.cause, Cause::Communication { .. } | Cause::Bubble | Cause::Straggler { .. })
    };
    let overhead: f64 = limits.iter().filter(overhead).map(|limit| limit.share).sum();
    if overhead >= MIN_SHARE {
        let remarks = lockstep_sim::advice::batch_remarks(plan, 2 * plan.train.global_batch);
        let lr = remarks.map_or(String::new(), |remarks| {
            format!(" It would need lr {:.1e} and its own warm-up.", remarks.lr)
        });
        notes.push(format!(
            "A larger global batch would lower the share of communication, but it is not a free fix: it takes fewer \
             optimizer steps per token (above the critical batch size the loss per token gets worse), more memory or \
             more accumulation, and it hides the bottleneck instead of removing it.{lr}"
        ));
    }
    let queue = limits.iter().find(|limit| limit.cause == Cause::BusyHost);
    if let Some(queue) = queue.filter(|limit| limit.share >= BUSY_SHARE) {
        notes.push(format!(
            "The ranks waited for a core {:.0}% of the step, also inside collectives. Predicted gains are unreliable until \
             the host is quiet; diagnose a run without other processes before you apply a change.",
            100.0 * queue.share
        ));
    }
    if !calibrated.described {
        notes.push(
            "Predictions use a generic machine, scaled to this run. `lockstep bench machine` measures yours and makes \
             them more accurate."
                .into(),
        );
    }
    if !traced {
        notes.push(
            "There is no timeline of this run. `lockstep train … --trace 20..23`, or `lockstep trace RUN --request 3` \
             while it runs, splits waiting from moving data and measures every operation."
                .into(),
        );
    }
    notes
}

/// Whether `other` offloads all that `now` does, and more.
fn adds(now: Offload, other: Offload) -> bool {
    let parts =
        |offload: Offload| [offload.optimizer(), offload.gradients(), offload.activations()];
    now != other && parts(now).into_iter().zip(parts(other)).all(|(now, other)| other || !now)
}

/// The cheapest ways to need less memory: settings that need less, fastest first.
pub(super) fn ways_to_fit(plan: &Plan, calibrated: &Calibrated) -> Vec<(Vec<String>, f64, f64)> {
    let (layout, train) = (&plan.layout, &plan.train);
    let mut sets: Vec<String> =
        vec!["layout.recompute=selective".into(), "layout.recompute=full".into()];
    if train.micro_batch > 1 {
        sets.push(format!("train.micro_batch={}", train.micro_batch / 2));
    }
    if layout.data > 1 {
        sets.extend((layout.zero + 1..=3).map(|zero| format!("layout.zero={zero}")));
    }
    if plan.precision.compute == Dtype::F32 {
        sets.push("precision.compute=bf16".into());
    }
    if plan.device.kind == DeviceType::Cuda {
        let more = Offload::NAMES.iter().filter(|(_, offload)| adds(layout.offload, *offload));
        sets.extend(more.map(|(name, _)| format!("layout.offload={name}")));
    }
    let bytes = |estimate: &lockstep_sim::Estimate| {
        estimate.stages.iter().map(|stage| stage.memory.total()).fold(0.0, f64::max)
    };
    let before = bytes(&calibrated.base);
    let mut ways: Vec<(Vec<String>, f64, f64)> = sets
        .into_iter()
        .filter_map(|set| {
            let changed = changed_plan(plan, std::slice::from_ref(&set), calibrated).ok()?;
            let after = estimate(&changed, &calibrated.cluster, &calibrated.options);
            let saved = before - bytes(&after);
            let slower = after.step_s / calibrated.base.step_s - 1.0;
            (saved > 0.02 * before).then_some((vec![set], saved, slower))
        })
        .collect();
    ways.sort_by(|a, b| a.2.total_cmp(&b.2));
    ways.truncate(3);
    ways
}
