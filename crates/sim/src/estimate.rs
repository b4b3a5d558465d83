//! What one optimizer step of a plan comes to on a cluster.

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

/// What is assumed beside the plan and the cluster.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Options {
    /// Whose training program.
    pub software: Software,
    /// Matrix multiplies of layers in 8 bits, where the plan computes in 16.
    pub fp8: bool,
    /// Memory and traffic of this program to the byte, as the plan counts them, walking every block of every
    /// micro-batch; otherwise by formula.
    pub exact: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { software: Software::lockstep(), fp8: false, exact: false }
    }
}

/// One optimizer step, predicted.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Estimate {
    /// Whether every rank has memory enough.
    pub fits: bool,
    /// Seconds.
    pub step_s: f64,
    pub tokens_per_s: f64,
    pub time: Time,
    /// Of the slowest rank's computing, its kinds and their seconds, as `bench step` counts them.
    pub computing: Vec<(OpClass, f64)>,
    /// By rank of the pipeline.
    pub stages: Vec<Stage>,
    /// Every exchange of the first rank.
    pub flows: Vec<Flow>,
    /// Of the peak of the numbers that matrices are multiplied in, what the model needs: attention as the whole
    /// square, as most papers count.
    pub mfu: f64,
    /// The same with the half of the square that a causal mask leaves.
    pub mfu_causal: f64,
    /// Of the peak, what is computed, with all that is computed again; attention as it is computed.
    pub hfu: f64,
}

/// Where the time of the slowest rank goes, in seconds: the parts make the step.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Time {
    /// Passes, without exchanges; what is computed again is in it.
    pub compute: f64,
    /// Of the passes, the device waiting for its host.
    pub host: f64,
    /// Exchanges behind which no computing hides, by axis.
    pub tensor: f64,
    pub context: f64,
    pub expert: f64,
    pub data: f64,
    /// Waiting for other stages, and for messages.
    pub bubble: f64,
    pub optimizer: f64,
    /// Waiting for ranks that are slower.
    pub straggling: f64,
}

impl Time {
    /// Exchanges that nothing hides.
    pub fn exposed(&self) -> f64 {
        self.tensor + self.context + self.expert + self.data
    }

    pub fn total(&self) -> f64 {
        self.compute + self.host + self.exposed() + self.bubble + self.optimizer + self.straggling
    }
}

/// A rank of the pipeline.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Stage {
    pub memory: MemoryEstimate,
    /// Of that, what the device has.
    pub available: f64,
    /// Seconds of a micro-batch, all chunks together: forward; gradient of the input, with what is computed again;
    /// gradient of the weights.
    pub forward: f64,
    pub input: f64,
    pub weights: f64,
    /// Seconds of a step in which it works.
    pub busy: f64,
}

/// Memory, traffic and time of one optimizer step.
pub fn estimate(plan: &Plan, cluster: &Cluster, options: &Options) -> Estimate {
    let cluster = &*cluster.shared(plan.ranks, plan.train.threads);
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
    }
}

/// Of each rank of the pipeline, the memory of the smallest device among its replicas.
pub(crate) fn available(cluster: &Cluster, mesh: &Mesh) -> Vec<f64> {
    let mut least = vec![cluster.accelerator.memory(); mesh.pipe];
    for rank in cluster.differing(mesh.ranks()) {
        let pipe = mesh.coord(rank).pipe;
        least[pipe] = least[pipe].min(cluster.of_rank(rank).2);
    }
    least
}
