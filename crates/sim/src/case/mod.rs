//! The sizes that all cost formulas use: a plan on a cluster, seen from one rank.

mod groups;
mod params;

use lockstep_plan::model::{Family, Latent, Moe, Shape};
use lockstep_plan::reduction::{PolicyInputs, ReductionPolicy};
use lockstep_plan::{Dtype, Layout, Mesh, Offload, Plan};

use crate::Cluster;
use crate::compute::OpClass;
use crate::estimate::Options;
use crate::software::Software;

/// A plan on a cluster. Sizes are per rank and micro-batch. Layer sizes are those of the majority of layers; see
/// [`Case::lead`] for the others.
#[derive(Clone)]
pub(crate) struct Case<'a> {
    pub plan: &'a Plan,
    pub cluster: &'a Cluster,
    pub options: &'a Options,
    pub mesh: Mesh,
    /// When parameters are gathered and gradients reduced.
    pub policy: ReductionPolicy,
    /// Sequences of the micro-batch.
    pub batch: f64,
    /// Length of a whole sequence.
    pub seq: f64,
    /// Tokens that matmuls see.
    pub tokens: f64,
    /// Rows that norms and residuals see: fewer than `tokens` with sequence parallelism.
    pub rows: f64,
    /// Bytes per number in the compute type.
    pub width: f64,
    pub dim: f64,
    /// Columns of queries, keys, values and of the attention output.
    pub queries: f64,
    pub keys: f64,
    pub values: f64,
    pub attended: f64,
    /// Width of a head's queries and keys.
    pub head_dim: f64,
    /// Width of a head's values.
    pub value_dim: f64,
    pub latent: Option<Latent>,
    /// Width of the feed-forward after its activation.
    pub ffn: f64,
    /// Width of the feed-forward before its activation: twice `ffn` with a gate.
    pub inner: f64,
    pub vocab: f64,
    pub moe: Option<Moe>,
    /// Tensor ranks among which whole experts are distributed, each with its own tokens; 1 if they shard each expert.
    pub tensor_experts: f64,
}

impl<'a> Case<'a> {
    pub fn new(plan: &'a Plan, cluster: &'a Cluster, options: &'a Options) -> Case<'a> {
        let (shape, layout) = (&plan.model, &plan.layout);
        let tensor = layout.tensor as f64;
        let tokens = (plan.train.micro_batch * plan.data.seq) as f64 / layout.context as f64;
        let moe = shape.moe.filter(|_| shape.family == Family::Moe);
        let whole = moe.is_some() && options.software.whole_experts;
        let tensor_experts = if whole { tensor } else { 1.0 };
        let ffn = shape.ffn as f64 / tensor * tensor_experts;
        let key_heads = (shape.kv_heads as f64 / tensor).max(1.0);
        Case {
            plan,
            cluster,
            options,
            mesh: plan.mesh(),
            policy: ReductionPolicy::new(PolicyInputs::of(plan, options.software.program())),
            batch: plan.train.micro_batch as f64,
            seq: plan.data.seq as f64,
            tokens,
            rows: if layout.sequence { tokens / tensor } else { tokens },
            width: plan.precision.compute.bytes() as f64,
            dim: shape.dim as f64,
            queries: (shape.heads * shape.head_dim) as f64 / tensor,
            keys: key_heads * shape.head_dim as f64,
            values: key_heads * shape.value_dim() as f64,
            attended: shape.attention_dim() as f64 / tensor,
            head_dim: shape.head_dim as f64,
            value_dim: shape.value_dim() as f64,
            latent: shape.latent,
            ffn,
            inner: if shape.family == Family::Gpt2 { ffn } else { 2.0 * ffn },
            vocab: (shape.vocab as f64 / tensor).ceil(),
            moe,
            tensor_experts,
        }
    }

    /// The case for the leading dense layers of a mixture of experts.
    pub fn lead(&self) -> Option<Case<'a>> {
        let lead = self.shape().lead?;
        let ffn = lead.ffn as f64 / self.layout().tensor as f64;
        Some(Case { ffn, inner: 2.0 * ffn, moe: None, tensor_experts: 1.0, ..self.clone() })
    }

    /// State in host memory. None on CPUs, whose memory it is in any case.
    pub fn offloads(&self) -> Offload {
        match self.cluster.cores {
            Some(_) => Offload::None,
            None => self.layout().offload,
        }
    }

    /// Whether communication overlaps with compute. On one device that ranks share, it takes time from compute.
    pub fn overlaps(&self) -> bool {
        self.policy.overlap && !self.cluster.engine.shares_accelerator()
    }

    pub fn software(&self) -> &Software {
        &self.options.software
    }

    pub fn layout(&self) -> &Layout {
        &self.plan.layout
    }

    pub fn shape(&self) -> &Shape {
        &self.plan.model
    }

    pub fn gpt2(&self) -> bool {
        self.shape().family == Family::Gpt2
    }

    /// Bytes per parameter of weights and of optimizer state. In f32 the master weights are the working weights.
    pub fn state_bytes(&self) -> [f64; 2] {
        let Software { weights, optimizer, .. } = self.software();
        match self.plan.precision.compute {
            Dtype::F32 => [4.0, (optimizer - 4.0).max(0.0)],
            _ => [*weights, *optimizer],
        }
    }

    /// Peak FLOP/s of the layers' matmuls; MFU is relative to it.
    pub fn rate(&self) -> f64 {
        let peak = &self.cluster.accelerator.peak;
        let tera = match (self.plan.precision.compute, self.fp8()) {
            (Dtype::F32, _) => peak.f32,
            (_, true) => peak.fp8.unwrap_or(peak.bf16),
            (_, false) => peak.bf16,
        };
        tera * 1e12
    }

    /// Whether the layers' matmuls are computed in FP8.
    pub fn fp8(&self) -> bool {
        let supported = self.cluster.accelerator.peak.fp8.is_some();
        self.options.fp8 && supported && self.plan.precision.compute != Dtype::F32
    }

    /// Peak FLOP/s of operations that stay in bf16 when matmuls use FP8.
    pub fn bf16_rate(&self) -> f64 {
        self.rate().min(self.cluster.accelerator.peak.bf16 * 1e12)
    }

    /// FLOP/s of the layers' matmuls; in FP8 less than the peak.
    pub fn matmul_rate(&self) -> f64 {
        self.rate() * if self.fp8() { self.cluster.accelerator.matmul.fp8 } else { 1.0 }
    }

    /// Measured efficiency of an operation class at a size, if there is one. Ranks that share an accelerator fill it as
    /// well as one rank with all of their work.
    pub fn measured(&self, kind: OpClass, size: f64) -> Option<f64> {
        let efficiency = self.cluster.accelerator.efficiency.as_ref()?;
        let size = match kind {
            OpClass::Attention | OpClass::Matmul => size,
            _ => size * self.cluster.ranks_per_accelerator(self.plan.ranks) as f64,
        };
        efficiency.curve(self.plan.precision.compute, self.shape().family, kind).at(size)
    }

    /// Bytes per second of a memory-bound operation class.
    pub fn stream_rate(&self, kind: OpClass) -> f64 {
        self.stream_rate_at(kind, self.size(kind))
    }

    pub fn stream_rate_at(&self, kind: OpClass, size: f64) -> f64 {
        self.cluster.accelerator.stream_rate() * self.measured(kind, size).unwrap_or(1.0)
    }

    /// Size by which the efficiency of an operation class varies. For memory-bound operations it is the number of
    /// elements, which decides whether they fit into caches; for attention it combines sequence length and head width.
    pub fn size(&self, kind: OpClass) -> f64 {
        match kind {
            OpClass::Rope => self.tokens * (self.queries + 2.0 * self.keys),
            OpClass::Activation => self.tokens * self.inner,
            OpClass::Loss => self.tokens * self.vocab,
            // Isolated rates are measured by length; how much of them a step reaches depends on the head size.
            OpClass::Attention if !self.cluster.accelerator.attention_rates.is_empty() => {
                self.head_dim
            }
            OpClass::Attention => (self.seq * self.head_dim).sqrt(),
            OpClass::Optimizer => self.rank_params(0).iter().sum(),
            // A typical one of the four matmuls of a layer.
            OpClass::Matmul => (self.tokens * self.layer_params()[0] / 4.0).cbrt(),
            _ => self.rows * self.dim,
        }
    }

    pub fn pipe(&self) -> usize {
        self.layout().pipe
    }

    pub fn stages(&self) -> usize {
        self.layout().pipe * self.layout().chunks
    }

    pub fn micros(&self) -> usize {
        self.plan.train.accumulation
    }

    /// Layers of a stage: distributed evenly, with the remainder on the stages between the first and the last.
    pub fn layers(&self, stage: usize) -> usize {
        layers_of(self.shape().layers, self.stages(), stage)
    }

    /// Layers of a stage by kind: regular layers and leading dense layers.
    pub fn kinds(&self, stage: usize) -> [usize; 2] {
        let (layers, all) = (self.layers(stage), self.shape().layers);
        let Some(lead) = self.shape().lead else { return [layers, 0] };
        let before = layers_before(all, self.stages(), stage);
        let first = lead.layers.saturating_sub(before).min(layers);
        [layers - first, first]
    }
}

fn layers_of(layers: usize, stages: usize, stage: usize) -> usize {
    let (each, more) = (layers / stages, layers % stages);
    // The remainder goes to stages 1, 2, …, then to the first, then to the last.
    let turn = match stage {
        0 => stages.saturating_sub(2),
        last if last + 1 == stages => stages - 1,
        middle => middle - 1,
    };
    each + usize::from(turn < more)
}

/// Layers of all stages before `stage`.
fn layers_before(layers: usize, stages: usize, stage: usize) -> usize {
    let (each, more) = (layers / stages, layers % stages);
    let middle = more.min(stage.saturating_sub(1));
    stage * each + middle + usize::from(stage > 0 && more + 1 == stages)
}

#[cfg(test)]
mod tests {
    use super::{layers_before, layers_of};

    #[test]
    fn layers_before_sums_the_layers_of_earlier_stages() {
        for (layers, stages) in [(61, 1), (61, 2), (61, 16), (61, 61), (5, 3), (7, 4), (8, 4)] {
            for stage in 0..stages {
                let before: usize = (0..stage).map(|stage| layers_of(layers, stages, stage)).sum();
                let found = layers_before(layers, stages, stage);
                assert_eq!(found, before, "{layers} {stages} {stage}");
            }
        }
    }
}
