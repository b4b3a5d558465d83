//! The estimate of one optimizer step of a plan on a cluster.

use lockstep_plan::model::flops_per_token;
use lockstep_plan::{Mesh, Plan};
use serde::{Deserialize, Serialize};

use crate::case::Case;
use crate::cluster::Cluster;
use crate::comm::{Flow, traffic};
use crate::compute::OpClass;
use crate::memory::{MemoryEstimate, memory};
use crate::software::Software;
use crate::step::step;

/// Assumptions besides the plan and the cluster.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Options {
    /// The training program.
    pub software: Software,
    /// Compute the matmuls of layers in FP8 if the plan computes in bf16.
    pub fp8: bool,
    /// Take memory and traffic from the plan's ledger, exact to the byte for this program, instead of from formulas.
    pub exact: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { software: Software::lockstep(), fp8: false, exact: false }
    }
}

/// Prediction for one optimizer step.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Estimate {
    /// Whether every rank has enough memory.
    pub fits: bool,
    pub step_s: f64,
    pub tokens_per_s: f64,
    pub time: Time,
    /// Compute seconds of the busiest rank by operation class, as `bench step` measures them.
    pub computing: Vec<(OpClass, f64)>,
    /// One entry per pipeline rank.
    pub stages: Vec<Stage>,
    /// Communication of the first rank.
    pub flows: Vec<Flow>,
    /// Model FLOPs utilization relative to the peak of the matmul type. Attention counts as the full square, as in
    /// most papers.
    pub mfu: f64,
    /// MFU with the causal half of attention.
    pub mfu_causal: f64,
    /// Hardware FLOPs utilization: counts recomputation, and attention as it is computed.
    pub hfu: f64,
    /// Fraction of the peak FLOP/s that the busiest rank reaches while it computes.
    pub compute_rate: f64,
}

/// Time breakdown of the busiest rank of the pipeline, in seconds. The parts add up to the step time.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Time {
    /// Forward and backward passes, with recomputation, without communication.
    pub compute: f64,
    /// Kernel overhead: the time of launches and of short kernels beyond their work, and of the host between steps.
    pub host: f64,
    /// Exposed communication of each axis.
    pub tensor: f64,
    pub context: f64,
    pub expert: f64,
    pub data: f64,
    /// Waiting for other pipeline stages and their messages.
    pub bubble: f64,
    pub optimizer: f64,
    /// Waiting for slower ranks.
    pub straggling: f64,
}

impl Time {
    /// Exposed communication of all axes.
    pub fn exposed(&self) -> f64 {
        self.tensor + self.context + self.expert + self.data
    }

    /// The mean of ranks that share a device: each gets the time that others do not use.
    pub(crate) fn mean(ranks: &[Time]) -> Time {
        let mean = |of: fn(&Time) -> f64| ranks.iter().map(of).sum::<f64>() / ranks.len() as f64;
        Time {
            compute: mean(|time| time.compute),
            host: mean(|time| time.host),
            tensor: mean(|time| time.tensor),
            context: mean(|time| time.context),
            expert: mean(|time| time.expert),
            data: mean(|time| time.data),
            bubble: mean(|time| time.bubble),
            optimizer: mean(|time| time.optimizer),
            straggling: mean(|time| time.straggling),
        }
    }

    pub fn total(&self) -> f64 {
        self.compute + self.host + self.exposed() + self.bubble + self.optimizer + self.straggling
    }
}

/// Estimate for one pipeline rank.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Stage {
    pub memory: MemoryEstimate,
    /// Memory of the device, in bytes.
    pub available: f64,
    /// Seconds per micro-batch over all chunks: forward, input gradient (with recomputation), weight gradient.
    pub forward: f64,
    pub input: f64,
    pub weights: f64,
    /// Seconds of a step in which the rank is not idle.
    pub busy: f64,
}

/// Estimates memory, traffic and time of one optimizer step.
pub fn estimate(plan: &Plan, cluster: &Cluster, options: &Options) -> Estimate {
    let cluster = &*cluster.for_rank(plan.ranks, plan);
    let case = Case::new(plan, cluster, options);
    let step = step(&case);
    let available = available(cluster, &case.mesh);
    let stages: Vec<Stage> = (0..case.pipe())
        .map(|pipe| Stage {
            memory: memory(&case, pipe),
            available: available[pipe],
            forward: step.forward[pipe],
            input: step.input[pipe],
            weights: step.weights[pipe],
            busy: step.busy[pipe],
        })
        .collect();
    let flops = flops_per_token(&plan.model, plan.data.seq);
    let tokens = plan.tokens_per_step() as f64;
    let peak = case.rate() * plan.ranks as f64 * step.seconds;
    Estimate {
        fits: stages.iter().all(|stage| stage.memory.total() <= stage.available),
        step_s: step.seconds,
        tokens_per_s: tokens / step.seconds,
        time: step.time,
        computing: OpClass::ALL
            .into_iter()
            .zip(step.by)
            .filter(|(_, spent)| *spent > 0.0)
            .collect(),
        stages,
        flows: match options.exact && plan.model.planned_only().is_none() {
            true => traffic(plan, cluster, 0),
            false => step.flows,
        },
        mfu: tokens * (flops.weights + 2.0 * flops.attention) / peak,
        mfu_causal: tokens * flops.total() / peak,
        hfu: step.flops / peak,
        compute_rate: step.rank_flops / (case.rate() * step.time.compute),
    }
}

/// Memory of each pipeline rank: that of the smallest device among its replicas.
pub(crate) fn available(cluster: &Cluster, mesh: &Mesh) -> Vec<f64> {
    let mut least = vec![cluster.accelerator.memory(); mesh.pipe];
    for rank in cluster.differing(mesh.ranks()) {
        let pipe = mesh.coord(rank).pipe;
        least[pipe] = least[pipe].min(cluster.of_rank(rank).2);
    }
    least
}
