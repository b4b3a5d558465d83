//! What DeepSeek's models have besides: attention through a narrow latent, and first layers without experts. Counted
//! for planning; no block computes them.

use serde::{Deserialize, Serialize};

use super::Shape;

/// Multi-head latent attention (DeepSeek-V2, 2024): keys and values, and mostly queries too, come from a narrow vector
/// of each token. A head's queries and keys are `nope + rope` wide, of which `rope` tells positions; the keys' is one
/// for all heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Latent {
    /// Width of the queries' latent; none: queries come from the stream, as usual.
    pub q_rank: Option<usize>,
    /// Of that of keys and values.
    pub kv_rank: usize,
    pub nope: usize,
    pub rope: usize,
    /// Width of a head's values, and of its output.
    pub value: usize,
}

/// The first layers of a mixture, which have one wide feed-forward instead.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Lead {
    pub layers: usize,
    pub ffn: usize,
}

impl Latent {
    /// Columns that all ranks of the tensor axis compute alike from the stream: both latents, and the shared part of
    /// the keys.
    pub fn narrow(&self) -> usize {
        self.q_rank.unwrap_or(0) + self.kv_rank + self.rope
    }
}

impl Shape {
    /// Width of a head's values.
    pub fn value_dim(&self) -> usize {
        self.latent.map_or(self.head_dim, |latent| latent.value)
    }

    /// Layers that have experts.
    pub fn expert_layers(&self) -> usize {
        let lead = self.lead.map_or(0, |lead| lead.layers);
        if self.moe.is_some() { self.layers.saturating_sub(lead) } else { 0 }
    }

    /// Weights of a layer's attention that a token meets.
    pub(super) fn attention_weights(&self) -> usize {
        let out = self.attention_dim() * self.dim;
        let Some(latent) = self.latent else { return self.dim * self.qkv_dim() + out };
        let queries = self.heads * self.head_dim;
        let from = latent.q_rank.unwrap_or(self.dim);
        let values = self.heads * (latent.nope + latent.value);
        self.dim * latent.narrow() + from * queries + latent.kv_rank * values + out
    }

    /// Why this model can be planned and not trained, where that is so.
    pub fn planned_only(&self) -> Option<&'static str> {
        match (self.latent, self.lead) {
            (Some(_), _) => Some("multi-head latent attention (kv_lora_rank)"),
            (None, Some(_)) => Some("first layers without experts (dense_layers)"),
            (None, None) => None,
        }
    }
}
