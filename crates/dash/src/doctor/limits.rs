//! The limits of the step: its parts along the slowest path, each with its share, its evidence and a confidence.

use lockstep_events::trace::Breakdown;
use lockstep_plan::Plan;
use serde::Serialize;

use super::calibration::{Calibrated, is_memory_bound};
use super::evidence::{
    bubble_evidence, busy_evidence, checkpoint_evidence, communication, compute_evidence,
    memory_evidence, ms, si,
};
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
    /// A link with much less bandwidth than expected.
    SlowLink {
        ranks: (usize, usize),
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
            Cause::SlowLink { ranks: (one, other) } => {
                format!("slow link (rank {one} to rank {other})")
            }
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
    let (sure, busy) = (confidence(measured), measured.is_busy());
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
            memory_evidence(plan, trace, calibrated, memory_bound),
        ),
        (Cause::Data, read, vec![format!("reading samples takes {} per step", ms(read))]),
        (Cause::Checkpoint, measured.checkpoint, checkpoint_evidence(measured)),
        (Cause::BusyHost, queue, busy_evidence(measured, queue)),
        (Cause::Bubble, pipe, bubble_evidence(plan, measured)),
    ];
    parts.extend(communication(plan, measured, calibrated, comm + skew, skew));
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
    if let Some(link) = measured.slow_link {
        let part = slow_link(&mut parts, link);
        parts.push(part);
    }
    if let Some(imbalance) = measured.expert_imbalance.filter(|imbalance| *imbalance > 1.3) {
        let mut part = expert_imbalance(plan, &mut parts, imbalance);
        if let Some((layer, expert, load)) = measured.fullest_expert {
            part.2.push(format!(
                "the fullest is expert {expert} of layer {layer}: {load:.1}× the mean"
            ));
        }
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

/// A slow link lengthens communication by the ratio of the bandwidths. What it takes more is moved from these parts to
/// the link.
fn slow_link(
    parts: &mut [(Cause, f64, Vec<String>)],
    (one, other, rate, expected): (usize, usize, f64, f64),
) -> (Cause, f64, Vec<String>) {
    let excess = (1.0 - rate / expected).clamp(0.0, 1.0);
    let mut seconds = 0.0;
    for (cause, part, _) in parts.iter_mut() {
        if matches!(cause, Cause::Communication { .. } | Cause::Bubble) {
            seconds += excess * *part;
            *part *= 1.0 - excess;
        }
    }
    let evidence = format!(
        "the link between ranks {one} and {other} has {}B/s, {:.0}% of the expected {}B/s",
        si(rate),
        100.0 * rate / expected,
        si(expected)
    );
    (Cause::SlowLink { ranks: (one, other) }, seconds, vec![evidence])
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
    let share = |classes: Vec<(String, f64)>| {
        let total: f64 = classes.iter().map(|class| class.1).sum();
        let slow: f64 =
            classes.iter().filter(|class| is_memory_bound(&class.0)).map(|class| class.1).sum();
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
