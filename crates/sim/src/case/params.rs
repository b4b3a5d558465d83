//! Parameter counts of one rank.

use lockstep_plan::model::Latent;

use super::Case;

impl Case<'_> {
    /// Parameters of a layer on this rank: dense ones, and those of experts.
    pub fn layer_params(&self) -> [f64; 2] {
        let (dim, heads) = (self.dim, self.queries + self.keys + self.values);
        let attention = self.attention_params();
        let two = self.feed_forward_params();
        match (self.moe, self.gpt2()) {
            (Some(moe), _) => {
                let here = self.experts_here();
                let shared = moe.shared as f64 * two / self.tensor_experts;
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
        self.moe.map_or(0.0, |moe| moe.experts as f64)
            / self.mesh.expert as f64
            / self.tensor_experts
    }

    /// Feed-forward rows per token: routed rows and rows of shared experts. A dense layer has one.
    pub fn slots(&self) -> [f64; 2] {
        self.moe.map_or([1.0, 0.0], |moe| {
            [moe.top_k as f64 / self.tensor_experts, moe.shared as f64 / self.tensor_experts]
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
        let ends: f64 = self.stages_of(pipe).map(|stage| self.end_params(stage)).sum();
        let [dense, experts] = self.rank_layer_params(pipe);
        [dense + ends, experts]
    }

    /// The same without embedding and head.
    pub fn rank_layer_params(&self, pipe: usize) -> [f64; 2] {
        let [dense, expert] = self.layer_params();
        let lead = self.lead().map_or(0.0, |lead| lead.layer_params()[0]);
        self.stages_of(pipe).fold([0.0, 0.0], |[all, experts], stage| {
            let [layers, first] = self.kinds(stage).map(|layers| layers as f64);
            [all + layers * dense + first * lead, experts + layers * expert]
        })
    }

    /// Stages of a pipeline rank.
    pub fn stages_of(&self, pipe: usize) -> impl Iterator<Item = usize> {
        (pipe..self.stages()).step_by(self.pipe())
    }
}
