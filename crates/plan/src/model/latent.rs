//! Additions of DeepSeek's models: attention through low-rank latents, and first layers without experts. Used for
//! planning only; no block computes them.

use serde::{Deserialize, Serialize};

use super::Shape;

/// Multi-head latent attention (DeepSeek-V2, 2024): keys and values, and usually queries too, are projected from a
/// low-rank latent of each token. Queries and keys of a head have `nope + rope` columns, of which `rope` encode
/// positions; these are shared by the keys of all heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Latent {
    /// Rank of the queries' latent; none if queries are projected from the stream.
    pub q_rank: Option<usize>,
    /// Rank of the latent of keys and values.
    pub kv_rank: usize,
    pub nope: usize,
    pub rope: usize,
    /// Columns of a head's values and of its output.
    pub value: usize,
}

/// The first layers of a mixture of experts, which have one dense feed-forward instead.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Lead {
    pub layers: usize,
    pub ffn: usize,
}

impl Latent {
    /// Columns that are replicated along the tensor axis: both latents, and the shared part of the keys.
    pub fn replicated_columns(&self) -> usize {
        self.q_rank.unwrap_or(0) + self.kv_rank + self.rope
    }
}

impl Shape {
    /// Columns of a head's values.
    pub fn value_dim(&self) -> usize {
        self.latent.map_or(self.head_dim, |latent| latent.value)
    }

    /// Layers with experts.
    pub fn expert_layers(&self) -> usize {
        let lead = self.lead.map_or(0, |lead| lead.layers);
        if self.moe.is_some() { self.layers.saturating_sub(lead) } else { 0 }
    }

    /// Weights of a layer's attention that every token is multiplied with.
    pub(super) fn attention_weights(&self) -> usize {
        let out = self.attention_dim() * self.dim;
        let Some(latent) = self.latent else { return self.dim * self.qkv_dim() + out };
        let queries = self.heads * self.head_dim;
        let from = latent.q_rank.unwrap_or(self.dim);
        let values = self.heads * (latent.nope + latent.value);
        self.dim * latent.replicated_columns() + from * queries + latent.kv_rank * values + out
    }

    /// The feature because of which this model can be planned but not trained.
    pub fn planned_only(&self) -> Option<&'static str> {
        match (self.latent, self.lead) {
            (Some(_), _) => Some("multi-head latent attention (kv_lora_rank)"),
            (None, Some(_)) => Some("first layers without experts (dense_layers)"),
            (None, None) => None,
        }
    }
}
