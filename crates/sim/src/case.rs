//! The sizes that all cost formulas use: a plan on a cluster, seen from one rank.

use lockstep_plan::model::{Family, Latent, Moe, Shape};
use lockstep_plan::{Axis, Dtype, Layout, Mesh, Plan};

use crate::compute::OpClass;
use crate::estimate::Options;
use crate::software::Software;
use crate::{Cluster, GroupPlacement};

/// A plan on a cluster. Sizes are per rank and micro-batch. Layer sizes are those of the majority of layers; see
/// [`Case::lead`] for the others.
#[derive(Clone)]
pub(crate) struct Case<'a> {
    pub plan: &'a Plan,
    pub cluster: &'a Cluster,
    pub options: &'a Options,
    pub mesh: Mesh,
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
    /// Tensor ranks that hold whole experts and their own tokens; 1 if tensor ranks shard each expert.
    pub dealt: f64,
}

impl<'a> Case<'a> {
    pub fn new(plan: &'a Plan, cluster: &'a Cluster, options: &'a Options) -> Case<'a> {
        let (shape, layout) = (&plan.model, &plan.layout);
        let tensor = layout.tensor as f64;
        let tokens = (plan.train.micro_batch * plan.data.seq) as f64 / layout.context as f64;
        let moe = shape.moe.filter(|_| shape.family == Family::Moe);
        let whole = moe.is_some() && options.software.whole_experts;
        let dealt = if whole { tensor } else { 1.0 };
        let ffn = shape.ffn as f64 / tensor * dealt;
        let key_heads = (shape.kv_heads as f64 / tensor).max(1.0);
        Case {
            plan,
            cluster,
            options,
            mesh: plan.mesh(),
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
            dealt,
        }
    }

    /// The case for the leading dense layers of a mixture of experts.
    pub fn lead(&self) -> Option<Case<'a>> {
        let lead = self.shape().lead?;
        let ffn = lead.ffn as f64 / self.layout().tensor as f64;
        Some(Case { ffn, inner: 2.0 * ffn, moe: None, dealt: 1.0, ..self.clone() })
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
        let tera = match self.plan.precision.compute {
            Dtype::F32 => peak.f32,
            _ if self.options.fp8 => peak.fp8.unwrap_or(peak.bf16),
            _ => peak.bf16,
        };
        tera * 1e12
    }

    /// Peak FLOP/s of operations that stay in bf16 when matmuls use FP8.
    pub fn bf16_rate(&self) -> f64 {
        self.rate().min(self.cluster.accelerator.peak.bf16 * 1e12)
    }

    /// FLOP/s of the layers' matmuls; in FP8 less than the peak.
    pub fn matmul_rate(&self) -> f64 {
        let fp8 = self.rate() > self.bf16_rate();
        self.rate() * if fp8 { self.cluster.accelerator.matmul.fp8 } else { 1.0 }
    }

    /// Whether gradient reductions overlap with the backward pass.
    pub fn data_overlap(&self) -> bool {
        self.software().data_overlap && self.plan.comm.overlap.data
    }

    /// Measured efficiency of an operation class at a size, if there is one.
    pub fn measured(&self, kind: OpClass, size: f64) -> Option<f64> {
        let efficiency = self.cluster.accelerator.efficiency.as_ref()?;
        efficiency.of(self.plan.precision.compute, self.shape().family).of(kind).at(size)
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

    /// Distance in ranks between neighbours along an axis.
    fn stride(&self, axis: Axis) -> usize {
        let order = self.mesh.order;
        let at = order.iter().position(|other| *other == axis).unwrap_or(0);
        order[at + 1..].iter().map(|inner| self.mesh.size(*inner)).product()
    }

    pub fn tensor(&self) -> GroupPlacement {
        GroupPlacement { members: self.mesh.tensor, stride: self.stride(Axis::Tensor) }
    }

    pub fn context(&self) -> GroupPlacement {
        GroupPlacement { members: self.mesh.context, stride: self.stride(Axis::Context) }
    }

    pub fn pipeline(&self) -> GroupPlacement {
        GroupPlacement { members: self.mesh.pipe, stride: self.stride(Axis::Pipe) }
    }

    /// Ranks with the same dense parameters.
    pub fn replicas(&self) -> GroupPlacement {
        let [data, context] = [Axis::Data, Axis::Context].map(|axis| self.stride(axis));
        let closest = match (self.mesh.data, self.mesh.context) {
            (_, 1) => data,
            (1, _) => context,
            _ => self.mixed(data, context),
        };
        GroupPlacement { members: self.mesh.replicas(), stride: closest }
    }

    /// Equivalent stride of replicas that extend over two axes with strides `data` and `context`: it puts as many of
    /// them on one closest link as there really are.
    fn mixed(&self, data: usize, context: usize) -> usize {
        let span = self.cluster.links[0].span.unwrap_or(self.mesh.ranks());
        let near = |stride: usize, size: usize| (span / stride).clamp(1, size);
        let together = near(data, self.mesh.data) * near(context, self.mesh.context);
        (span / together).max(data.min(context))
    }

    /// Replicas that shard states among themselves.
    pub fn shard(&self) -> GroupPlacement {
        GroupPlacement { members: self.mesh.shard, ..self.replicas() }
    }

    /// Replicas that hold the same shard.
    pub fn copies(&self) -> GroupPlacement {
        let all = self.replicas();
        GroupPlacement {
            members: all.members / self.mesh.shard,
            stride: all.stride * self.mesh.shard,
        }
    }

    /// Ranks that exchange tokens with each other's experts.
    pub fn experts(&self) -> GroupPlacement {
        let replicas = self.replicas();
        let members = self.mesh.expert * self.dealt as usize;
        let inside = self.tensor().stride.min(replicas.stride);
        GroupPlacement { members, stride: if self.dealt > 1.0 { inside } else { replicas.stride } }
    }

    /// Ranks with the same experts.
    pub fn same_experts(&self) -> GroupPlacement {
        let all = self.replicas();
        GroupPlacement {
            members: all.members / self.mesh.expert,
            stride: all.stride * self.mesh.expert,
        }
    }

    /// Parameters of a layer on this rank: dense ones, and those of experts.
    pub fn layer_params(&self) -> [f64; 2] {
        let (dim, heads) = (self.dim, self.queries + self.keys + self.values);
        let attention = self.attention_params();
        let two = self.feed_forward_params();
        match (self.moe, self.gpt2()) {
            (Some(moe), _) => {
                let here = self.experts_here();
                let shared = moe.shared as f64 * two / self.dealt;
                [attention + 2.0 * dim + dim * moe.experts as f64 + shared, here * two]
            }
            // Two norms with biases, and the biases of four matrices.
            (None, true) => [attention + two + 4.0 * dim + heads + dim + self.inner + dim, 0.0],
            (None, false) => [attention + two + 2.0 * dim, 0.0],
        }
    }

    /// Attention parameters of a layer, without biases.
    pub fn attention_params(&self) -> f64 {
        let (dim, out) = (self.dim, self.attended * self.dim);
        let Some(latent) = self.latent else {
            return dim * (self.queries + self.keys + self.values) + out;
        };
        let [narrow, kv] = [latent.replicated_columns(), latent.kv_rank].map(|size| size as f64);
        let norms = kv + latent.q_rank.unwrap_or(0) as f64;
        dim * narrow + norms + self.from() * self.queries + kv * self.unfolded() + out
    }

    /// Input width of the query projection: the query latent, or the stream.
    pub fn from(&self) -> f64 {
        self.latent.and_then(|latent| latent.q_rank).map_or(self.dim, |rank| rank as f64)
    }

    /// Output columns of the up-projection of the KV latent; the rotary part of keys does not come from it.
    pub fn unfolded(&self) -> f64 {
        let rope = self.latent.map_or(0.0, |latent| latent.rope as f64);
        self.keys + self.values - self.keys / self.head_dim * rope
    }

    /// Columns that tensor ranks gather before attention: the stream, or the latents.
    pub fn entering(&self) -> f64 {
        let stream = |latent: Latent| if latent.q_rank.is_some() { 0.0 } else { self.dim };
        self.latent.map_or(self.dim, |latent| latent.replicated_columns() as f64 + stream(latent))
    }

    /// Parameters of one feed-forward or of one expert.
    pub fn feed_forward_params(&self) -> f64 {
        self.dim * self.inner + self.ffn * self.dim
    }

    /// Experts of a layer on this rank.
    pub fn experts_here(&self) -> f64 {
        self.moe.map_or(0.0, |moe| moe.experts as f64) / self.mesh.expert as f64 / self.dealt
    }

    /// Feed-forward rows per token: routed rows and rows of shared experts. A dense layer has one.
    pub fn slots(&self) -> [f64; 2] {
        self.moe.map_or([1.0, 0.0], |moe| {
            [moe.top_k as f64 / self.dealt, moe.shared as f64 / self.dealt]
        })
    }

    /// Parameters of embedding and head on a stage.
    pub fn end_params(&self, stage: usize) -> f64 {
        let (first, last) = (stage == 0, stage + 1 == self.stages());
        let table = self.vocab * self.dim;
        let positions = if self.gpt2() { self.shape().seq as f64 * self.dim } else { 0.0 };
        let norm = if self.gpt2() { 2.0 * self.dim } else { self.dim };
        let own_table = !self.shape().tied || self.pipe() > 1;
        let embed = if first { table + positions } else { 0.0 };
        let head = if last { norm + if own_table { table } else { 0.0 } } else { 0.0 };
        embed + head
    }

    /// Parameters of a pipeline rank: dense ones, and those of experts.
    pub fn rank_params(&self, pipe: usize) -> [f64; 2] {
        let [dense, expert] = self.layer_params();
        let lead = self.lead().map_or(0.0, |lead| lead.layer_params()[0]);
        let stages = (0..self.layout().chunks).map(|chunk| chunk * self.pipe() + pipe);
        stages.fold([0.0, 0.0], |[all, experts], stage| {
            let [layers, first] = self.kinds(stage).map(|layers| layers as f64);
            let own = layers * dense + first * lead + self.end_params(stage);
            [all + own, experts + layers * expert]
        })
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
