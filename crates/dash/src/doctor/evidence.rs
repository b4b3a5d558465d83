//! Evidence for the parts of a step: FLOP/s and bytes/s reached, waiting times, uneven stages.

use lockstep_events::trace::Breakdown;
use lockstep_plan::model::flops_per_token;
use lockstep_plan::{GroupKind, Plan};
use lockstep_sim::Link;
use lockstep_types::trace::CommAxis;

use super::calibration::Calibrated;
use super::latency::CallCost;
use super::limits::Cause;
use super::measured::{Measured, median};

pub(super) fn compute_evidence(
    plan: &Plan,
    measured: &Measured,
    trace: Option<&[Breakdown]>,
) -> Vec<String> {
    let flops = flops_per_token(&plan.model, plan.data.seq);
    let per_rank = plan.tokens_per_step() as f64 / plan.ranks as f64;
    let compute = median(measured.compute.iter().copied()).max(f64::MIN_POSITIVE);
    let mut evidence = Vec::new();
    if measured.peak_flops > 0.0 {
        let reached = flops.total() * per_rank / compute;
        evidence.push(format!(
            "{} FLOP/s while computing, {:.0}% of the measured peak of {} FLOP/s",
            si(reached),
            100.0 * reached / measured.peak_flops,
            si(measured.peak_flops)
        ));
    }
    let kernel = |class: &str| {
        let rank = trace?.first()?;
        rank.kernels.iter().find(|kernel| kernel.class == class).map(|kernel| kernel.seconds)
    };
    for (class, work) in [("matmul", flops.weights), ("attention", flops.attention)] {
        if let Some(seconds) = kernel(class).filter(|seconds| *seconds > 0.0) {
            let reached = work * per_rank / seconds;
            evidence.push(format!(
                "{class}: {} per step at {} FLOP/s{}",
                ms(seconds),
                si(reached),
                percent_of(reached, measured.peak_flops)
            ));
        }
    }
    let tokens = (plan.train.micro_batch * plan.data.seq / plan.layout.context) as f64;
    let (dim, bytes) = (plan.model.dim as f64, plan.precision.compute.bytes() as f64);
    let intensity = 2.0 * tokens * dim * dim / (bytes * (2.0 * tokens * dim + dim * dim));
    evidence.push(format!(
        "a {tokens:.0} × {dim:.0} × {dim:.0} matrix product has {intensity:.0} FLOPs per byte"
    ));
    evidence
}

fn percent_of(reached: f64, peak: f64) -> String {
    match peak > 0.0 {
        true => format!(", {:.0}% of the peak", 100.0 * reached / peak),
        false => String::new(),
    }
}

pub(super) fn memory_evidence(
    plan: &Plan,
    trace: Option<&[Breakdown]>,
    calibrated: &Calibrated,
    share: f64,
) -> Vec<String> {
    let mut evidence = vec![match trace {
        Some(_) => {
            format!("{:.0}% of the traced operations are not matrix products", 100.0 * share)
        }
        None => format!(
            "{:.0}% of compute is predicted to be limited by memory; record a timeline to measure it",
            100.0 * share
        ),
    }];
    let optimizer = trace.and_then(|ranks| ranks.first()).map(|rank| rank.optimizer);
    if let Some(seconds) = optimizer.filter(|seconds| *seconds > 0.0) {
        // Gradient, master and two moments are read; master, moments and a bf16 copy are written.
        let own = plan.part(0).len() as f64;
        let shards = if plan.layout.zero > 0 { plan.layout.shard as f64 } else { 1.0 };
        let bytes = 28.0 * own / shards;
        let reached = bytes / seconds;
        let of = percent_of(reached, calibrated.stream_rate.unwrap_or(0.0));
        evidence.push(format!("optimizer: {} at {}B/s{of}", ms(seconds), si(reached)));
    }
    for kernel in trace.and_then(|ranks| ranks.first()).map_or(&[][..], |rank| &rank.kernels) {
        let moved = calibrated.moved.iter().find(|(class, _)| class.name() == kernel.class);
        if let Some((_, bytes)) = moved.filter(|_| kernel.seconds > 0.0) {
            let reached = bytes / kernel.seconds;
            let of = percent_of(reached, calibrated.stream_rate.unwrap_or(0.0));
            let class = &kernel.class;
            evidence.push(format!(
                "{class}: {} per step at {}B/s{of}",
                ms(kernel.seconds),
                si(reached)
            ));
        }
    }
    evidence
}

pub(super) fn busy_evidence(measured: &Measured, queue: f64) -> Vec<String> {
    vec![format!(
        "ranks wait {} per step for a free core ({:.0}% of the step): other processes use the host, or there are more \
         threads than cores",
        ms(queue),
        100.0 * queue / measured.step
    )]
}

/// Bytes per second below which the storage of checkpoints is called slow. A single hard disk is faster.
const SLOW_STORAGE: f64 = 5e7;

pub(super) fn checkpoint_evidence(measured: &Measured) -> Vec<String> {
    let mut evidence = vec![format!(
        "checkpoints block training for {} per step on average",
        ms(measured.checkpoint)
    )];
    if let Some((bytes, seconds)) = measured.save.filter(|(bytes, s)| *bytes > 1e6 && *s > 0.0) {
        let rate = bytes / seconds;
        let slow = if rate < SLOW_STORAGE { ": slow storage" } else { "" };
        evidence.push(format!(
            "{}B are written in {} ({}B/s{slow})",
            si(bytes),
            ms(seconds),
            si(rate)
        ));
    }
    evidence
}

/// Compute time of each pipeline rank.
pub(super) fn stage_seconds(plan: &Plan, measured: &Measured) -> Vec<f64> {
    let mesh = plan.mesh();
    let stage = |pipe: usize| {
        let ranks = (0..measured.compute.len().min(plan.ranks))
            .filter(move |rank| mesh.coord(*rank).pipe == pipe);
        median(ranks.map(|rank| measured.compute[rank]))
    };
    (0..plan.layout.pipe).map(stage).collect()
}

pub(super) fn bubble_evidence(plan: &Plan, measured: &Measured) -> Vec<String> {
    let stages = stage_seconds(plan, measured);
    let most = stages.iter().copied().fold(0.0, f64::max);
    let mean = stages.iter().sum::<f64>() / stages.len().max(1) as f64;
    let mut evidence = vec![format!(
        "stages wait {} per step for each other; {} micro-batches on {} stages",
        ms(median(measured.pipe.iter().copied())),
        plan.train.accumulation,
        plan.layout.pipe * plan.layout.chunks
    )];
    if mean > 0.0 && most > 1.15 * mean {
        let slowest = stages.iter().position(|seconds| *seconds == most).unwrap_or(0);
        evidence.push(format!(
            "the stages are uneven: stage {slowest} computes {}, {:.2}× the mean",
            ms(most),
            most / mean
        ));
    }
    evidence
}

/// Exposed communication by axis. `skew` is the part of it that is waiting for ranks that arrive a little later.
pub(super) fn communication(
    plan: &Plan,
    measured: &Measured,
    calibrated: &Calibrated,
    seconds: f64,
    skew: f64,
) -> Vec<(Cause, f64, Vec<String>)> {
    let axes: Vec<&(String, f64)> =
        measured.exposed.iter().filter(|(axis, _)| axis != "pipe").collect();
    let total: f64 = axes.iter().map(|(_, seconds)| seconds).sum();
    let default = ("data".to_string(), 1.0);
    let axes = if total > 0.0 { axes } else { vec![&default] };
    let total = if total > 0.0 { total } else { 1.0 };
    axes.into_iter()
        .map(|(axis, own)| {
            let own = seconds * own / total;
            let mut evidence = vec![format!(
                "{} per step, {} of it waiting for ranks that arrive later",
                ms(own),
                ms(own * skew / seconds.max(f64::MIN_POSITIVE))
            )];
            if measured.bytes_sent > 1 << 10 && own > 0.0 {
                evidence.push(format!(
                    "{}B sent per rank and step, {}B/s while communication is exposed",
                    si(measured.bytes_sent as f64),
                    si(measured.bytes_sent as f64 / own)
                ));
            }
            if let Some(CallCost { calls, latency, latency_share }) = measured.call_cost {
                evidence.push(format!(
                    "{calls:.0} collectives per step in the timeline; each takes {}, however small: {:.0}% of their time",
                    ms(latency),
                    100.0 * latency_share
                ));
            }
            evidence.extend(link_evidence(calibrated, axis, own));
            if axis == "data" && plan.comm.bucket_bytes < 1 << 18 {
                let kib = plan.comm.bucket_bytes as f64 / 1024.0;
                evidence.push(format!("gradient buckets of {kib:.0} KiB are small"));
            }
            (Cause::Communication { axis: axis.clone() }, own, evidence)
        })
        .collect()
}

/// Planned bytes of an axis by link, and the part of the link's bandwidth that they need in `seconds`.
fn link_evidence(calibrated: &Calibrated, axis: &str, seconds: f64) -> Vec<String> {
    let Calibrated { base, machine_links, .. } = calibrated;
    let mut sent = vec![0.0; machine_links.len()];
    let flows = base.flows.iter();
    for flow in flows.filter(|flow| flow.kind.map_or(CommAxis::Data, axis_of).name() == axis) {
        if let Some(sent) = sent.get_mut(flow.link) {
            *sent += flow.sent();
        }
    }
    let describe = |(bytes, link): (f64, &Link)| {
        let gbs = link.bandwidth_gbs * 1e9;
        // Without a description of the machine, the bandwidth of its links is unknown.
        let part = match calibrated.described && seconds > 0.0 {
            true => format!(
                ", {:.0}% of its {}B/s if all of it is exposed",
                100.0 * bytes / seconds / gbs,
                si(gbs)
            ),
            false => String::new(),
        };
        format!("{}: {}B planned per rank and step{part}", link.name, si(bytes))
    };
    let links = sent.into_iter().zip(machine_links);
    links.filter(|(bytes, _)| *bytes >= 1024.0).map(describe).collect()
}

/// The axis of metrics.jsonl whose exposed time contains the calls of a group.
fn axis_of(kind: GroupKind) -> CommAxis {
    match kind {
        GroupKind::Tensor => CommAxis::Tensor,
        GroupKind::Context => CommAxis::Context,
        GroupKind::Expert => CommAxis::Expert,
        GroupKind::Pipe => CommAxis::Pipe,
        _ => CommAxis::Data,
    }
}

pub(super) fn ms(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 0.01 => format!("{:.0} ms", 1e3 * s),
        s => format!("{:.2} ms", 1e3 * s),
    }
}

/// A number with an SI prefix: `1.2 G`.
pub(super) fn si(number: f64) -> String {
    let (scaled, prefix) = match number.abs() {
        n if n >= 1e12 => (number / 1e12, "T"),
        n if n >= 1e9 => (number / 1e9, "G"),
        n if n >= 1e6 => (number / 1e6, "M"),
        n if n >= 1e3 => (number / 1e3, "k"),
        _ => (number, ""),
    };
    format!("{scaled:.1} {prefix}")
}
