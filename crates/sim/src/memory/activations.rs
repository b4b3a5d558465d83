//! What a layer keeps of a micro-batch for its backward pass, by what is computed again.

use lockstep_plan::Recompute;

use crate::case::Case;
use crate::software::Selective;

/// What a rank's layers take of a micro-batch, whatever ZeRO's stage, the schedule and the placement: asked once for many
/// layouts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layers {
    /// Bytes that a layer keeps until its backward pass; of most layers, and of a mixture's first.
    pub kept: [f64; 2],
    /// The same for weight gradients that were put off.
    pub put_off: [f64; 2],
    /// For a moment, in a backward pass.
    pub working: f64,
}

impl Layers {
    pub fn of(case: &Case) -> Layers {
        let lead = case.lead();
        let both = |bytes: fn(&Case) -> f64| [bytes(case), lead.as_ref().map_or(0.0, bytes)];
        Layers {
            kept: both(kept),
            put_off: both(put_off),
            working: working(case) + layer_inside(case),
        }
    }
}

/// Bytes that a layer keeps until its backward pass.
fn kept(case: &Case) -> f64 {
    let parts = Parts::of(case);
    match (case.layout().recompute, case.software().selective) {
        (Recompute::None, _) => parts.all(),
        (Recompute::Full, _) => parts.input,
        (Recompute::Selective, Selective::CoreAttention) => parts.all() - parts.square,
        (Recompute::Selective, Selective::FeedForward) => parts.all() - parts.square - parts.wide,
        // Queries, keys and values, the heads' output, and every other matrix's output.
        (Recompute::Selective, Selective::OtherMatmuls) => {
            parts.input + parts.between + 0.5 * (parts.attention + parts.wide) + parts.square
        }
    }
}

/// What a layer has inside for the moment in which it is computed again.
fn layer_inside(case: &Case) -> f64 {
    let parts = Parts::of(case);
    match case.layout().recompute {
        Recompute::None => 0.0,
        _ => parts.all() - kept(case),
    }
}

/// Bytes that a layer keeps for weight gradients that were put off: of every matrix its input, and the gradient of its
/// output.
fn put_off(case: &Case) -> f64 {
    let slots = case.slots().iter().sum::<f64>();
    let attention = case.queries + case.keys + case.values + case.attended + 2.0 * case.dim;
    let wide = case.inner + case.ffn + 2.0 * case.dim;
    case.tokens * case.width * (attention + slots * wide)
}

/// Gradients of activations inside one layer: of the wide part before its activation, and of the stream. That behind
/// the activation takes the place of what it was computed from.
pub(super) fn working(case: &Case) -> f64 {
    let slots = case.slots().iter().sum::<f64>();
    (case.tokens * slots * case.inner + 2.0 * case.rows * case.dim) * case.width
}

/// Columns of queries, keys, values, the heads' output, and the latents with their norms.
fn heads_kept(case: &Case) -> f64 {
    let latents = case.latent.map_or(0.0, |latent| {
        let ranks = latent.q_rank.unwrap_or(0) + latent.kv_rank;
        (latent.replicated_columns() + ranks) as f64
            / if case.layout().sequence { case.mesh.tensor as f64 } else { 1.0 }
    });
    case.queries + case.keys + case.values + case.attended + latents
}

struct Parts {
    /// Of the layer.
    input: f64,
    /// Between its halves, and what norms put out.
    between: f64,
    /// Queries, keys, values, and the heads' output.
    attention: f64,
    /// Scores, where they are written out.
    square: f64,
    wide: f64,
    masks: f64,
    rest: f64,
}

impl Parts {
    fn of(case: &Case) -> Parts {
        let (software, w) = (case.software(), case.width);
        let stream = case.rows * case.dim * w;
        let dropout = case.shape().dropout > 0.0;
        let heads = case.queries / case.head_dim;
        let own = case.seq / case.mesh.context as f64;
        // Softmax, mask and what dropout leaves.
        let square = match (software.flash, dropout) {
            (true, _) => 0.0,
            (false, true) => case.batch * heads * own * case.seq * (2.0 * w + 1.0),
            (false, false) => case.batch * heads * own * case.seq * w,
        };
        let statistics = if software.flash { 4.0 * case.tokens * heads } else { 0.0 };
        // Inputs of matrices, whole on every rank unless the sequence is cut.
        let norms = if software.kept.norms { 2.0 * stream } else { 0.0 };
        let before = case.inner + if software.kept.activations { case.ffn } else { 0.0 };
        let wide = match case.moe {
            None => case.tokens * before * w,
            // Every slot's row as it came; weights of slots are multiplied in before the last matrix.
            Some(moe) => {
                let [slots, shared] = case.slots().map(|slots| case.tokens * slots);
                let shared = shared * before * w;
                slots * (before + case.dim) * w + shared + 4.0 * case.tokens * moe.experts as f64
            }
        };
        Parts {
            input: stream,
            between: stream + norms,
            attention: case.tokens * heads_kept(case) * w + statistics,
            square,
            wide,
            masks: if dropout { 2.0 * case.rows * case.dim } else { 0.0 },
            rest: case.rows * case.dim * software.kept.dim
                + case.tokens * case.ffn * software.kept.ffn,
        }
    }

    fn all(&self) -> f64 {
        let Parts { input, between, attention, square, wide, masks, rest } = self;
        input + between + attention + square + wide + masks + rest
    }
}
