//! Activations that a layer saves for backward, by recomputation setting.

use lockstep_plan::{Recompute, keeps_cheap};

use crate::case::Case;
use crate::software::Selective;

/// Activation memory of one layer and micro-batch. Independent of ZeRO level, schedule and placement, so it is computed
/// once for many layouts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layers {
    /// Bytes saved for backward: by a regular layer, and by a leading dense layer.
    pub saved: [f64; 2],
    /// Bytes saved for deferred weight gradients.
    pub deferred: [f64; 2],
    /// Temporary bytes during a backward pass.
    pub working: f64,
}

impl Layers {
    pub fn of(case: &Case) -> Layers {
        let lead = case.lead();
        let both = |bytes: fn(&Case) -> f64| [bytes(case), lead.as_ref().map_or(0.0, bytes)];
        Layers {
            saved: both(saved),
            deferred: both(deferred),
            working: working(case) + layer_inside(case),
        }
    }
}

/// Bytes that a layer saves for backward.
fn saved(case: &Case) -> f64 {
    let parts = Parts::of(case);
    match (case.layout().recompute, case.software().selective) {
        (Recompute::None | Recompute::Cheap, _) => parts.all(),
        (Recompute::Full, _) => parts.input,
        (Recompute::Selective, Selective::CoreAttention) => parts.all() - parts.square,
        (Recompute::Selective, Selective::FeedForward) => parts.all() - parts.square - parts.wide,
        // Saves q, k, v, the attention output, and the output of every second matmul.
        (Recompute::Selective, Selective::OtherMatmuls) => {
            parts.input + parts.between + 0.5 * (parts.attention + parts.wide) + parts.square
        }
    }
}

/// Bytes of a layer that exist only while it is recomputed.
fn layer_inside(case: &Case) -> f64 {
    let parts = Parts::of(case);
    match case.layout().recompute {
        Recompute::None | Recompute::Cheap => 0.0,
        _ => parts.all() - saved(case),
    }
}

/// Bytes that a layer saves for deferred weight gradients: the input of every matrix and the gradient of its output.
fn deferred(case: &Case) -> f64 {
    let slots = case.slots().iter().sum::<f64>();
    let attention = case.queries + case.keys + case.values + case.attended + 2.0 * case.dim;
    let wide = case.inner + case.ffn + 2.0 * case.dim;
    case.tokens * input_width(case) * (attention + slots * wide)
}

/// Bytes per number that is saved only as the input of a matmul.
fn input_width(case: &Case) -> f64 {
    if case.fp8() && case.software().fp8_inputs { 1.0 } else { case.width }
}

/// Activation gradients inside one layer: of the feed-forward before its activation, and of the stream. The gradient
/// after the activation reuses the buffer of its input.
pub(super) fn working(case: &Case) -> f64 {
    let slots = case.slots().iter().sum::<f64>();
    (case.tokens * slots * case.inner + 2.0 * case.rows * case.dim) * case.width
}

/// Columns of queries, keys, values, attention output, and latents with their norms.
fn saved_head_columns(case: &Case) -> f64 {
    let latents = case.latent.map_or(0.0, |latent| {
        let ranks = latent.q_rank.unwrap_or(0) + latent.kv_rank;
        (latent.replicated_columns() + ranks) as f64
            / if case.layout().sequence { case.mesh.tensor as f64 } else { 1.0 }
    });
    case.queries + case.keys + case.values + case.attended + latents
}

struct Parts {
    /// Input of the layer.
    input: f64,
    /// Stream between attention and feed-forward, and outputs of norms.
    between: f64,
    /// Queries, keys, values and attention output.
    attention: f64,
    /// Scores, without FlashAttention.
    square: f64,
    /// Inner activations of the feed-forward.
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
        // Softmax, dropout mask and dropout output.
        let square = match (software.flash, dropout) {
            (true, _) => 0.0,
            (false, true) => case.batch * heads * own * case.seq * (2.0 * w + 1.0),
            (false, false) => case.batch * heads * own * case.seq * w,
        };
        let statistics = if software.flash { 4.0 * case.tokens * heads } else { 0.0 };
        // Inputs of matmuls; tensor ranks hold all rows unless they use sequence parallelism.
        let input = input_width(case);
        let keeps = keeps_cheap(case.plan.device.kind, case.layout().recompute);
        let norms = match software.saved.norms || keeps {
            true => 2.0 * case.rows * case.dim * input,
            false => 0.0,
        };
        // Experts compute their hidden values again; a dense feed-forward on a GPU keeps them.
        let keeps_hidden = keeps && case.moe.is_none();
        let activated = match software.saved.activations || keeps_hidden {
            true => case.ffn * input,
            false => 0.0,
        };
        let before = case.inner * w + activated;
        let wide = match case.moe {
            None => case.tokens * before,
            // The input row of every slot. Routing weights are applied before the last matmul.
            Some(moe) => {
                let [slots, shared] = case.slots().map(|slots| case.tokens * slots);
                let rows = slots * (before + case.dim * input) + shared * before;
                rows + 4.0 * case.tokens * moe.experts as f64
            }
        };
        Parts {
            input: stream,
            between: stream + norms,
            attention: case.tokens * saved_head_columns(case) * w + statistics,
            square,
            wide,
            masks: if dropout { 2.0 * case.rows * case.dim } else { 0.0 },
            rest: case.rows * case.dim * software.saved.dim
                + case.tokens * case.ffn * software.saved.ffn,
        }
    }

    fn all(&self) -> f64 {
        let Parts { input, between, attention, square, wide, masks, rest } = self;
        input + between + attention + square + wide + masks + rest
    }
}
