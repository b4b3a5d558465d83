//! What limits the step: its parts along the slowest path, each with its share, its evidence and a confidence.

use lockstep_events::trace::Breakdown;
use lockstep_plan::Plan;
use lockstep_plan::model::flops_per_token;
use serde::Serialize;

use super::calibration::Calibrated;
use super::measured::{Measured, median};

/// A part of the step.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Limit {
    pub cause: Cause,
    /// Fraction of the step, 0 to 1.
    pub share: f64,
    pub evidence: Vec<String>,
    pub confidence: Confidence,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Cause {
    /// Matrix products and attention.
    Compute,
    /// Operations that are limited by memory bandwidth: norms, activations, residuals, the optimizer.
    MemoryBandwidth,
    /// Exposed communication of an axis.
    Communication {
        axis: String,
    },
    /// Waiting for other pipeline stages.
    Bubble,
    /// Reading samples.
    Data,
    Checkpoint,
    /// A rank that the others wait for.
    Straggler {
        rank: usize,
    },
    /// Other processes use the cores of the ranks.
    BusyHost,
    /// Experts with more tokens than others.
    ExpertImbalance,
}

impl Cause {
    pub fn name(&self) -> String {
        match self {
            Cause::Compute => "compute".into(),
            Cause::MemoryBandwidth => "memory bandwidth".into(),
            Cause::Communication { axis } => format!("exposed communication ({axis})"),
            Cause::Bubble => "pipeline bubble".into(),
            Cause::Data => "data".into(),
            Cause::Checkpoint => "checkpoints".into(),
            Cause::Straggler { rank } => format!("straggler (rank {rank})"),
            Cause::BusyHost => "busy host".into(),
            Cause::ExpertImbalance => "expert imbalance".into(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Confidence {
    High,
    Medium,
    Low,
}

/// Minimum ratio of a straggler's compute time to that of ranks with the same work.
const MIN_SLOWDOWN: f64 = 1.15;
/// Minimum excess of a straggler, as a fraction of the step.
const MIN_EXCESS: f64 = 0.05;

/// The slow rank among ranks with the same work, its slowdown, and the time that it costs.
struct Slow {
    rank: usize,
    ratio: f64,
    excess: f64,
}

pub(super) fn limits(
    plan: &Plan,
    measured: &Measured,
    trace: Option<&[Breakdown]>,
    calibrated: &Calibrated,
) -> Vec<Limit> {
    // Times on a busy host say little about anything but the host.
    let sure = confidence(measured);
    let busy = median(measured.queue.iter().copied()) > 0.2 * measured.step;
    let of = |cause: &Cause| match (busy, cause) {
        (true, Cause::BusyHost) | (false, _) => sure,
        (true, _) => Confidence::Low,
    };
    let total = measured.step + measured.checkpoint;
    let slow = slow_rank(plan, measured);
    let typical = |values: &[f64]| median(values.iter().copied());
    let (read, pipe) = (typical(&measured.read), typical(&measured.pipe));
    let compute_all = typical(&measured.compute);
    let queue = typical(&measured.queue).min(0.9 * compute_all);
    let excess = slow.as_ref().map_or(0.0, |slow| slow.excess);
    let comm = if plan.ranks > 1 { measured.pure_comm() } else { 0.0 };
    let compute = (compute_all - read - queue).max(0.0);
    // Ranks with equal work still differ a little; the rest of the step is waiting for the last one.
    let known = compute + read + queue + excess + comm + pipe;
    let skew = if plan.ranks > 1 { (measured.step - known).max(0.0) } else { 0.0 };
    let memory_bound = memory_bound(trace, calibrated);

    let mut parts: Vec<(Cause, f64, Vec<String>)> = vec![
        (Cause::Compute, compute * (1.0 - memory_bound), compute_evidence(plan, measured, trace)),
        (
            Cause::MemoryBandwidth,
            compute * memory_bound,
            memory_evidence(plan, trace, memory_bound),
        ),
        (Cause::Data, read, vec![format!("reading samples takes {} per step", ms(read))]),
        (
            Cause::Checkpoint,
            measured.checkpoint,
            vec![format!(
                "checkpoints block training for {} per step on average",
                ms(measured.checkpoint)
            )],
        ),
        (Cause::BusyHost, queue, busy_evidence(measured, queue)),
        (Cause::Bubble, pipe, bubble_evidence(plan, measured)),
    ];
    parts.extend(communication(plan, measured, comm + skew, skew));
    if let Some(slow) = &slow {
        let host =
            "check its host: other processes, power or thermal limits, memory errors, swapping";
        let mut evidence = vec![format!(
            "rank {} computes {:.2}× as long as ranks with the same work; the others wait {} per step for it",
            slow.rank,
            slow.ratio,
            ms(slow.excess)
        )];
        let queued = measured.queue.get(slow.rank).copied().unwrap_or(0.0);
        if queued > 0.3 * slow.excess {
            evidence.push(format!("{} of it the rank waits for a free core", ms(queued)));
        }
        evidence.push(host.into());
        parts.push((Cause::Straggler { rank: slow.rank }, slow.excess, evidence));
    }
    if let Some(imbalance) = measured.expert_imbalance.filter(|imbalance| *imbalance > 1.3) {
        let part = expert_imbalance(plan, &mut parts, imbalance);
        parts.push(part);
    }
    let sum: f64 = parts.iter().map(|part| part.1).sum();
    let scale = if sum > 0.0 { 1.0 / sum.max(total * 0.5) } else { 0.0 };
    let mut limits: Vec<Limit> = parts
        .into_iter()
        .map(|(cause, seconds, evidence)| Limit {
            confidence: of(&cause),
            cause,
            share: seconds * scale,
            evidence,
        })
        .filter(|limit| limit.share >= 0.005)
        .collect();
    limits.sort_by(|a, b| b.share.total_cmp(&a.share));
    limits
}

/// The fullest expert determines the time of the expert layers and of their communication: what it has more than the
/// mean is moved from these parts to the imbalance.
fn expert_imbalance(
    plan: &Plan,
    parts: &mut [(Cause, f64, Vec<String>)],
    imbalance: f64,
) -> (Cause, f64, Vec<String>) {
    let excess = 1.0 - 1.0 / imbalance;
    let mut seconds = 0.0;
    for (cause, part, _) in parts.iter_mut() {
        let fraction = match cause {
            Cause::Compute => plan_expert_fraction(plan),
            Cause::Communication { axis } if axis == "expert" => 1.0,
            _ => 0.0,
        };
        seconds += fraction * excess * *part;
        *part *= 1.0 - fraction * excess;
    }
    let evidence = format!("the fullest expert has {imbalance:.2}× the mean load of its layer");
    (Cause::ExpertImbalance, seconds, vec![evidence])
}

/// Half of the compute of a mixture of experts is in its experts, as a rule of thumb.
fn plan_expert_fraction(plan: &Plan) -> f64 {
    if plan.layout.expert > 1 { 0.5 } else { 0.1 }
}

fn confidence(measured: &Measured) -> Confidence {
    match (measured.reports, measured.variation) {
        (5.., variation) if variation < 0.15 => Confidence::High,
        (3.., variation) if variation < 0.4 => Confidence::Medium,
        _ => Confidence::Low,
    }
}

/// The slowest rank compared with the others on its pipeline stage.
fn slow_rank(plan: &Plan, measured: &Measured) -> Option<Slow> {
    let mesh = plan.mesh();
    let stage = |rank: usize| mesh.coord(rank).pipe;
    let ranks = 0..measured.compute.len().min(plan.ranks);
    let slow = |rank: usize| {
        let same = ranks.clone().filter(|other| *other != rank && stage(*other) == stage(rank));
        let typical = median(same.map(|other| measured.compute[other]));
        let (ratio, excess) = (measured.compute[rank] / typical, measured.compute[rank] - typical);
        let is_slow =
            typical > 0.0 && ratio >= MIN_SLOWDOWN && excess >= MIN_EXCESS * measured.step;
        is_slow.then_some(Slow { rank, ratio, excess })
    };
    ranks.clone().filter_map(slow).max_by(|a, b| a.excess.total_cmp(&b.excess))
}

/// Fraction of compute that is limited by memory bandwidth.
fn memory_bound(trace: Option<&[Breakdown]>, calibrated: &Calibrated) -> f64 {
    let bound = |class: &str| !matches!(class, "matmul" | "attention" | "loss");
    let share = |classes: Vec<(String, f64)>| {
        let total: f64 = classes.iter().map(|class| class.1).sum();
        let slow: f64 = classes.iter().filter(|class| bound(&class.0)).map(|class| class.1).sum();
        if total > 0.0 { slow / total } else { 0.0 }
    };
    match trace.and_then(|ranks| ranks.first()).filter(|rank| !rank.kernels.is_empty()) {
        Some(rank) => share(rank.kernels.iter().map(|k| (k.class.clone(), k.seconds)).collect()),
        None => {
            let computing = calibrated.base.computing.iter();
            share(computing.map(|(class, seconds)| (class.name().to_string(), *seconds)).collect())
        }
    }
}

fn compute_evidence(plan: &Plan, measured: &Measured, trace: Option<&[Breakdown]>) -> Vec<String> {
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

fn memory_evidence(plan: &Plan, trace: Option<&[Breakdown]>, share: f64) -> Vec<String> {
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
        evidence.push(format!("optimizer: {} at {}B/s", ms(seconds), si(bytes / seconds)));
    }
    evidence
}

fn busy_evidence(measured: &Measured, queue: f64) -> Vec<String> {
    vec![format!(
        "ranks wait {} per step for a free core ({:.0}% of the step): other processes use the host, or there are more \
         threads than cores",
        ms(queue),
        100.0 * queue / measured.step
    )]
}

fn bubble_evidence(plan: &Plan, measured: &Measured) -> Vec<String> {
    let mesh = plan.mesh();
    let stage = |pipe: usize| {
        let ranks = (0..measured.compute.len().min(plan.ranks))
            .filter(move |rank| mesh.coord(*rank).pipe == pipe);
        median(ranks.map(|rank| measured.compute[rank]))
    };
    let stages: Vec<f64> = (0..plan.layout.pipe).map(stage).collect();
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
fn communication(
    plan: &Plan,
    measured: &Measured,
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
            if let Some((one, other, rate, expected)) = measured.slow_link {
                evidence.push(format!(
                    "the link between ranks {one} and {other} has {}B/s, {:.0}% of the expected {}B/s",
                    si(rate),
                    100.0 * rate / expected,
                    si(expected)
                ));
            }
            if axis == "data" && plan.comm.bucket_bytes < 1 << 18 {
                let kib = plan.comm.bucket_bytes as f64 / 1024.0;
                evidence.push(format!("gradient buckets of {kib:.0} KiB are small"));
            }
            (Cause::Communication { axis: axis.clone() }, own, evidence)
        })
        .collect()
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
