//! What a model is made of, as numbers: its shape, its parameters block by block, its FLOPs.

mod count;
mod latent;
mod params;
mod part;
mod slices;

pub use count::{Flops, flops_per_token, loss_chunk};
pub use latent::{Latent, Lead};
pub use params::{BlockParams, Init, Param, Split, Whole};
pub use part::{Part, Shard, Unit};
pub use slices::{Runs, Slice, overlaps};

use serde::{Deserialize, Serialize};

/// Which of the three forms a model has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Learned positions, LayerNorm, biases, GELU.
    Gpt2,
    /// Rotary positions, RMSNorm, no biases, SwiGLU, grouped keys.
    Llama,
    /// Llama with a mixture of experts in the place of each SwiGLU, in the Mixtral form, or with shared experts.
    Moe,
}

/// The numbers that make a model.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Shape {
    pub family: Family,
    pub vocab: usize,
    /// Width of the residual stream.
    pub dim: usize,
    pub layers: usize,
    pub heads: usize,
    /// Heads of keys and values; each serves `heads / kv_heads` heads of queries.
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Width inside the feed-forward part (of one expert).
    pub ffn: usize,
    /// Longest sequence.
    pub seq: usize,
    /// The output projection is the token embedding.
    pub tied: bool,
    pub norm_eps: f64,
    pub dropout: f64,
    /// Base of the rotary wave lengths.
    pub rope_theta: f64,
    pub rope_scaling: Option<RopeScaling>,
    pub moe: Option<Moe>,
    /// Attention through a latent; `head_dim` is then that of queries and keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latent: Option<Latent>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lead: Option<Lead>,
}

/// Llama 3.1's stretching of the rotary wave lengths.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct RopeScaling {
    pub factor: f64,
    pub low_freq_factor: f64,
    pub high_freq_factor: f64,
    pub original_seq: usize,
}

/// How tokens meet experts.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Moe {
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Of each sequence, an expert takes the first `capacity × tokens × top_k / experts` slots and drops the
    /// rest (the groups of GShard are sequences here); without one it takes all.
    pub capacity: Option<f64>,
    /// Weight of the load-balancing loss: of each layer by itself, the mean over layers.
    pub aux_loss: f64,
    /// Among which tokens that loss wants experts evenly used.
    #[serde(default)]
    pub balance: Balance,
    /// Weight of the router's z-loss, the mean over tokens and layers.
    pub z_loss: f64,
    /// Experts that every token passes, beside those that it is sent to: one SwiGLU as wide as so many
    /// (DeepSeekMoE).
    #[serde(default)]
    pub shared: usize,
}

/// Among which tokens experts shall be evenly used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Balance {
    /// Those of each sequence, whatever the layout.
    #[default]
    Sequence,
    /// Those of a micro-batch of all replicas together: the global batch where it is not accumulated, and
    /// otherwise less of it the more it is. The only setting whose loss depends on the accumulation.
    Batch,
}

impl Shape {
    /// Columns of the fused projection to queries, keys and values.
    pub fn qkv_dim(&self) -> usize {
        (self.heads + self.kv_heads) * self.head_dim + self.kv_heads * self.value_dim()
    }

    /// Columns of the heads' joined output.
    pub fn attention_dim(&self) -> usize {
        self.heads * self.value_dim()
    }
}
