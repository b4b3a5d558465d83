//! The size of a model: its shape, the parameters of its blocks, its FLOPs, and the part that a rank holds.

mod check;
mod count;
mod families;
mod latent;
mod params;
mod part;
mod slices;

pub use check::{MAX_SIZE, ShapeError};
pub use count::{Flops, flops_per_token, loss_chunk};
pub use latent::{Latent, Lead};
pub use params::{BlockParams, Init, Param, Split, Tied, Whole};
pub use part::{Part, Shard, SharedParam, Unit};
pub use slices::{Runs, Slice, overlaps};

use serde::{Deserialize, Serialize};

use crate::cut;
use crate::mesh::{Coord, Mesh};

/// Architecture of a built-in model.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Learned positions, LayerNorm, biases, GELU.
    Gpt2,
    /// Rotary positions, RMSNorm, no biases, SwiGLU, grouped keys.
    Llama,
    /// Llama with a mixture of experts instead of each SwiGLU, as in Mixtral, optionally with shared experts.
    Moe,
}

impl Family {
    /// The values as they are typed.
    pub const NAMES: [(&str, Family); 3] =
        [("gpt2", Family::Gpt2), ("llama", Family::Llama), ("moe", Family::Moe)];

    pub fn name(self) -> &'static str {
        Family::NAMES[self as usize].0
    }
}

/// Hyperparameters of a built-in model.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Shape {
    pub family: Family,
    pub vocab: usize,
    /// Width of the residual stream.
    pub dim: usize,
    pub layers: usize,
    pub heads: usize,
    /// Key/value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Hidden size of the feed-forward (of one expert).
    pub ffn: usize,
    /// Longest sequence.
    pub seq: usize,
    /// The output projection is the token embedding.
    pub tied: bool,
    pub norm_eps: f64,
    pub dropout: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    pub rope_scaling: Option<RopeScaling>,
    pub moe: Option<Moe>,
    /// Latent attention; `head_dim` is then that of queries and keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latent: Option<Latent>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lead: Option<Lead>,
}

/// Llama 3.1's scaling of the rotary frequencies.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct RopeScaling {
    pub factor: f64,
    pub low_freq_factor: f64,
    pub high_freq_factor: f64,
    pub original_seq: usize,
}

/// A mixture of experts: routing, capacity and auxiliary losses.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Moe {
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Per sequence, an expert takes the first `capacity × tokens × top_k / experts` slots and drops the rest
    /// (GShard, with sequences as groups). `None` drops nothing.
    pub capacity: Option<f64>,
    /// Weight of the load-balancing loss, which is the mean over layers.
    pub aux_loss: f64,
    /// Tokens over which that loss balances the experts.
    #[serde(default)]
    pub balance: Balance,
    /// Weight of the router's z-loss, which is the mean over tokens and layers.
    pub z_loss: f64,
    /// Shared experts, which process every token: one SwiGLU with the hidden size of this many experts
    /// (DeepSeekMoE).
    #[serde(default)]
    pub shared: usize,
}

/// Tokens over which the load-balancing loss balances the experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Balance {
    /// The tokens of each sequence.
    #[default]
    Sequence,
    /// The tokens of the global batch. The gradient uses the experts' fractions of the previous step's batch, because
    /// those of the whole batch are known only after its last forward pass.
    Batch,
}

impl Shape {
    /// Numbers that ranks sum in each step for the loads of experts: slots and probabilities of each layer's experts, and
    /// the dropped slots.
    pub fn load_sums(&self) -> usize {
        self.moe.map_or(0, |moe| 2 * self.layers * moe.experts + 1)
    }

    /// Columns of the fused projection to queries, keys and values.
    pub fn qkv_dim(&self) -> usize {
        (self.heads + self.kv_heads) * self.head_dim + self.kv_heads * self.value_dim()
    }

    /// Columns of the heads' concatenated output.
    pub fn attention_dim(&self) -> usize {
        self.heads * self.value_dim()
    }

    /// Range of the vocabulary whose embeddings and logits are on the rank at `coord`.
    pub fn vocab_on_rank(&self, mesh: &Mesh, coord: Coord) -> std::ops::Range<usize> {
        cut(self.vocab, mesh.tensor, coord.tensor)
    }

    /// The shape with the heads, hidden sizes and vocabulary of the rank at `coord`.
    pub fn on_rank(&self, mesh: &Mesh, coord: Coord) -> Shape {
        Shape {
            vocab: self.vocab_on_rank(mesh, coord).len(),
            heads: self.heads / mesh.tensor,
            kv_heads: (self.kv_heads / mesh.tensor).max(1),
            ffn: self.ffn / mesh.tensor,
            lead: self.lead.map(|lead| Lead { ffn: lead.ffn / mesh.tensor, ..lead }),
            ..self.clone()
        }
    }
}
