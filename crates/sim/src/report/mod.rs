//! Reports a plan and its estimate as JSON, as text tables or as an HTML page. Computes nothing beyond the estimate.

mod html;
mod map;
mod text;
mod timeline;

pub use html::html;
pub use map::{Cells, matrix};
pub use text::{ladder_text, proposals_text, reasons_text, text};
pub use timeline::timeline;

use lockstep_plan::{Collective, GroupKind, Phase, Plan};
use serde::Serialize;

use crate::search::{Proposal, layout_words};
use crate::{Cluster, Flow, MemoryEstimate, OpClass, Time};

/// The JSON object of `lockstep plan --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    pub name: String,
    pub cluster: String,
    pub accelerator: String,
    pub ranks: usize,
    /// In the syntax of a run file.
    pub layout: String,
    pub parameters: usize,
    pub global_batch: usize,
    pub micro_batch: usize,
    pub accumulation: usize,
    pub seq: usize,
    pub fits: bool,
    /// Bytes by which the fullest rank exceeds its memory; negative if memory is left.
    pub over_bytes: f64,
    pub step_s: f64,
    pub tokens_per_s: f64,
    pub mfu: f64,
    pub mfu_causal: f64,
    pub hfu: f64,
    /// Time breakdown of the step, in seconds.
    pub time: Time,
    /// Compute seconds by operation class, as `bench step` measures them.
    pub computing: Vec<(OpClass, f64)>,
    /// By stage.
    pub memory: Vec<StageMemory>,
    pub traffic: Vec<Traffic>,
}

/// Memory of a rank of one pipeline stage.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct StageMemory {
    pub stage: usize,
    #[serde(flatten)]
    pub bytes: MemoryEstimate,
    pub total: f64,
    pub available: f64,
    /// Seconds of a step in which the rank is not idle.
    pub busy_s: f64,
}

/// Repeated collective of one rank in a step.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Traffic {
    /// None: all ranks.
    pub kind: Option<GroupKind>,
    pub members: usize,
    pub collective: Collective,
    pub phase: Phase,
    pub link: String,
    pub times: f64,
    /// Bytes per call.
    pub bytes: f64,
    /// Bytes that a rank sends per step.
    pub sent: f64,
    /// Seconds per step, without other traffic on the links.
    pub seconds: f64,
}

impl Report {
    pub fn of(proposal: &Proposal, cluster: &Cluster) -> Report {
        let Proposal { plan, estimate } = proposal;
        let stage = |(stage, of): (usize, &crate::Stage)| StageMemory {
            stage,
            bytes: of.memory,
            total: of.memory.total(),
            available: of.available,
            busy_s: of.busy,
        };
        Report {
            name: plan.name.clone(),
            cluster: cluster.name.clone(),
            accelerator: cluster.accelerator.name.clone(),
            ranks: plan.ranks,
            layout: layout_words(plan),
            parameters: plan.model.param_count(),
            global_batch: plan.train.global_batch,
            micro_batch: plan.train.micro_batch,
            accumulation: plan.train.accumulation,
            seq: plan.data.seq,
            fits: estimate.fits,
            over_bytes: proposal.over(),
            step_s: estimate.step_s,
            tokens_per_s: estimate.tokens_per_s,
            mfu: estimate.mfu,
            mfu_causal: estimate.mfu_causal,
            hfu: estimate.hfu,
            time: estimate.time,
            computing: estimate.computing.clone(),
            memory: estimate.stages.iter().enumerate().map(stage).collect(),
            traffic: estimate
                .flows
                .iter()
                .filter(|flow| flow.bytes > 0.0)
                .map(|flow| Traffic::of(flow, cluster))
                .collect(),
        }
    }
}

impl Traffic {
    fn of(flow: &Flow, cluster: &Cluster) -> Traffic {
        Traffic {
            kind: flow.kind,
            members: flow.members,
            collective: flow.collective,
            phase: flow.phase,
            link: cluster.links[flow.link].name.clone(),
            times: flow.times,
            bytes: flow.bytes,
            sent: flow.sent(),
            seconds: flow.total(),
        }
    }
}

/// Purposes of memory with their names.
pub(crate) fn lines(memory: &MemoryEstimate) -> [(&'static str, f64); 11] {
    [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("gathered", memory.gathered),
        ("logits", memory.logits),
        ("working", memory.working),
        ("buffers", memory.buffers),
        ("slack", memory.slack),
        ("reserve", memory.reserve),
        ("snapshot", memory.snapshot),
    ]
}

pub(crate) fn group_name(kind: Option<GroupKind>) -> &'static str {
    kind.map_or("all ranks", GroupKind::name)
}

pub(crate) fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
        Phase::Optimizer => "optimizer",
    }
}

/// `1.42 GiB`, `12.0 MiB`.
pub(crate) fn bytes_text(bytes: f64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = units.iter().find(|(_, power)| bytes.abs() >= (1u64 << power) as f64);
    match unit {
        Some((name, power)) => format!("{:.2} {name}", bytes / (1u64 << power) as f64),
        None => format!("{bytes:.0} B"),
    }
}

pub(crate) fn time_text(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.3} s"),
        s if s >= 1e-3 => format!("{:.2} ms", 1e3 * s),
        s => format!("{:.1} µs", 1e6 * s),
    }
}

/// One-line summary of a plan.
pub(crate) fn headline(plan: &Plan) -> String {
    let params = plan.model.param_count() as f64;
    let size = if params >= 1e9 {
        format!("{:.1}B", params / 1e9)
    } else {
        format!("{:.2}M", params / 1e6)
    };
    format!(
        "{}, {size} parameters, {}, {} × {} tokens per step",
        plan.model.family.name(),
        plan.precision.compute,
        plan.train.global_batch,
        plan.data.seq
    )
}
