//! How many floating-point operations a token costs, and of how many tokens there are logits at once.

use super::Shape;

/// Operations per token of a training step: forward and backward, without what recompute adds. A multiply
/// and an add count as two.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Flops {
    /// Matrix multiplies with parameters: 6 for each weight that a token meets.
    pub weights: f64,
    /// Scores and weighted sums of a causal attention: half of the square, as it is computed.
    pub attention: f64,
}

impl Flops {
    pub fn total(&self) -> f64 {
        self.weights + self.attention
    }
}

/// What a token of a sequence of `seq` costs.
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
    // Forward: two multiplies of (seq, head_dim) by (head_dim, seq) per head, 2 operations each; backward
    // twice that; a causal mask halves the pairs: token t meets t + 1 keys, (seq + 1) / 2 on average.
    let pairs = (seq + 1) as f64 / 2.0;
    let both = shape.heads * (shape.head_dim + shape.value_dim());
    let attention = 6.0 * shape.layers as f64 * both as f64 * pairs;
    Flops { weights: 6.0 * weights as f64, attention }
}

/// Logits of one chunk take at most this much, in f32, but at least those of `LEAST_CHUNK` tokens.
const CHUNK_BYTES: usize = 32 << 20;
const LEAST_CHUNK: usize = 64;

/// Tokens whose logits, `columns` of each, exist at once: the loss of `tokens` is computed in chunks, of equal
/// size so that none is a small rest.
pub fn loss_chunk(tokens: usize, columns: usize) -> usize {
    let most = (CHUNK_BYTES / (4 * columns)).max(LEAST_CHUNK);
    tokens.div_ceil(tokens.div_ceil(most).max(1)).max(1)
}
