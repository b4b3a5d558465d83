//! Floating-point operations per token, and the chunks of tokens in which the loss is computed.

use super::Shape;
use lockstep_types::DeviceType;

/// Operations per token of a training step, forward and backward, without recompute. A multiply-add counts as two.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Flops {
    /// Matrix multiplies with parameters: 6 for each weight that a token is multiplied with.
    pub weights: f64,
    /// Scores and weighted sums of causal attention: half of the square, as it is computed.
    pub attention: f64,
}

impl Flops {
    pub fn total(&self) -> f64 {
        self.weights + self.attention
    }
}

/// Operations of a token in a sequence of `seq` tokens.
pub fn flops_per_token(shape: &Shape, seq: usize) -> Flops {
    let attention = shape.attention_weights();
    let expert = 3 * shape.dim * shape.ffn;
    let mlp = match (shape.family, shape.moe) {
        (super::Family::Gpt2, _) => 2 * shape.dim * shape.ffn,
        (_, Some(moe)) => (moe.top_k + moe.shared) * expert + shape.dim * moe.experts,
        (_, None) => expert,
    };
    let lead = shape.lead.map_or(0, |lead| lead.layers * 3 * shape.dim * lead.ffn);
    let others = shape.layers - shape.lead.map_or(0, |lead| lead.layers);
    let weights = shape.layers * attention + others * mlp + lead + shape.vocab * shape.dim;
    // Forward: two multiplies of (seq, head_dim) by (head_dim, seq) per head, 2 operations each; backward is twice
    // that. The causal mask halves the pairs: token t attends to t + 1 keys, (seq + 1) / 2 on average.
    let pairs = (seq + 1) as f64 / 2.0;
    let both = shape.heads * (shape.head_dim + shape.value_dim());
    let attention = 6.0 * shape.layers as f64 * both as f64 * pairs;
    Flops { weights: 6.0 * weights as f64, attention }
}

/// Upper limit of the f32 logits of one chunk: on a CPU they stay in its cache, a GPU needs large matrices. A chunk
/// has at least `MIN_CHUNK` tokens, or all.
fn max_chunk_bytes(device: DeviceType) -> usize {
    match device {
        DeviceType::Cpu => 32 << 20,
        DeviceType::Cuda => 2 << 30,
    }
}

const MIN_CHUNK: usize = 64;

/// Tokens per chunk when the loss of `tokens` with `columns` logits each is computed in chunks of nearly equal size.
pub fn loss_chunk(device: DeviceType, tokens: usize, columns: usize) -> usize {
    let most = (max_chunk_bytes(device) / (4 * columns)).max(MIN_CHUNK);
    tokens.div_ceil(tokens.div_ceil(most).max(1)).max(1)
}
