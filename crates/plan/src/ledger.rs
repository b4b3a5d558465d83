//! How much memory a rank needs, by what it is for, before anything is allocated. States are exact to the
//! byte; activations count what blocks keep from forward to backward.

use crate::config::{Compute, Recompute};
use crate::model::{Balance, Family, Shape};
use serde::{Deserialize, Serialize};

/// Bytes on one rank, at their largest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ledger {
    /// f32 masters, and the copy that is computed with when it is another type.
    pub parameters: usize,
    /// f32.
    pub gradients: usize,
    /// Two f32 moments.
    pub optimizer: usize,
    /// What the blocks keep of one micro-batch.
    pub activations: usize,
}

impl Ledger {
    /// Of a rank that holds the whole model and works on micro-batches of `batch` sequences of `seq`.
    pub fn of(
        shape: &Shape,
        compute: Compute,
        recompute: Recompute,
        batch: usize,
        seq: usize,
    ) -> Ledger {
        let params = shape.param_count();
        let copy = if compute == Compute::F32 { 0 } else { compute.bytes() };
        Ledger {
            parameters: params * (4 + copy),
            gradients: params * 4,
            optimizer: params * 8,
            activations: activations(shape, compute, recompute, batch, seq),
        }
    }

    /// All of it, as if everything were at its largest at once.
    pub fn total(&self) -> usize {
        self.parameters + self.gradients + self.optimizer + self.activations
    }
}

/// The largest sum of what blocks keep, of all moments of a pass.
fn activations(
    shape: &Shape,
    compute: Compute,
    recompute: Recompute,
    batch: usize,
    seq: usize,
) -> usize {
    let tokens = batch * seq;
    let stream = tokens * shape.dim * compute.bytes();
    let halves = attention_half(shape, compute, tokens) + feed_forward_half(shape, batch, tokens);
    let inner = inner(shape, compute, tokens);
    let layers = shape.layers;
    match recompute {
        // Each layer's input, both halves, and the last layer's output.
        Recompute::None => layers * (stream + halves + inner) + stream,
        Recompute::Selective => layers * (stream + halves) + stream,
        // Every layer's input, and one layer whole: at the end of forward with its output, and in backward
        // with its inner part.
        Recompute::Full => layers * stream + halves + inner.max(stream),
    }
}

/// Norm statistics, q, k, v, the heads' output and log-sum-exp, and the stream behind them.
fn attention_half(shape: &Shape, compute: Compute, tokens: usize) -> usize {
    let wide = norm_stats(shape) + shape.heads;
    let kept = shape.qkv_dim() + shape.attention_dim() + shape.dim;
    tokens * (4 * wide + compute.bytes() * kept)
}

/// Norm statistics, and what a router decided.
fn feed_forward_half(shape: &Shape, batch: usize, tokens: usize) -> usize {
    let stats = 4 * tokens * norm_stats(shape);
    let Some(moe) = shape.moe else { return stats };
    let scopes = match moe.balance {
        _ if moe.aux_loss == 0.0 => 0,
        Balance::Sequence => batch,
        Balance::Batch => 1,
    };
    // Probabilities, their log-sum; choice, weight, order and place of each slot; where experts begin, and
    // the slope of their balance loss.
    stats + 4 * (tokens * (moe.experts + 1 + 4 * moe.top_k) + moe.experts * (1 + scopes) + 1)
}

/// The wide part between the projections, before its activation. Experts that drop tokens keep less; where they
/// are dealt out among ranks, each keeps what came to it: as much, when they are evenly used, and the rows
/// themselves.
fn inner(shape: &Shape, compute: Compute, tokens: usize) -> usize {
    let (rows, cols) = match (shape.family, shape.moe) {
        (Family::Gpt2, _) => (tokens, shape.ffn),
        (_, None) => (tokens, 2 * shape.ffn),
        (_, Some(moe)) => (tokens * (moe.top_k + moe.shared), 2 * shape.ffn),
    };
    rows * cols * compute.bytes()
}

/// Mean and deviation of a LayerNorm, or the root mean square.
fn norm_stats(shape: &Shape) -> usize {
    if shape.family == Family::Gpt2 { 2 } else { 1 }
}
