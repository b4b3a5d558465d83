//! One layer in time.

use lockstep_plan::Recompute;

use super::{Cost, OpClass, Passes, attention::attention, grouped, matmul};
use crate::case::Case;
use crate::cluster::Accelerator;
use crate::software::Selective;

/// A layer's passes over one micro-batch.
pub(crate) fn layer(case: &Case) -> Passes {
    let [attend, attend_back] = attention(case);
    let halves = [attention_matrices(case), feed_forward(case)];
    let streams = streams(case);
    let kernels = case.software().kernels;
    let none = Passes {
        forward: Cost { kernels: kernels[0], ..attend + streams[0] },
        again: Cost::default(),
        input: Cost { kernels: kernels[1], ..attend_back + streams[1] },
        weights: Cost::default(),
    };
    let passes = halves.into_iter().fold(none, |sum, half| sum + half);
    let again = match (case.layout().recompute, case.software().selective) {
        (Recompute::None, _) => Cost::default(),
        (Recompute::Full, _) => passes.forward,
        (Recompute::Selective, Selective::CoreAttention) if case.software().flash => {
            Cost::default()
        }
        (Recompute::Selective, Selective::CoreAttention) => attend,
        (Recompute::Selective, Selective::FeedForward) => up(case),
        (Recompute::Selective, Selective::OtherMatmuls) => {
            (halves[0].forward + halves[1].forward) * 0.5 + streams[0]
        }
    };
    Passes { again, ..passes }
}

/// Forward, input and weight gradient of a matrix (inputs, outputs) on `rows` rows, `count` of them.
fn matrix(case: &Case, rows: f64, sizes: [f64; 2], count: f64) -> Passes {
    matrix_at(case, rows, sizes, count, case.matrix_rate())
}

type Multiply = fn(&Accelerator, [f64; 3], f64, f64, f64, bool) -> f64;

/// The same at so many operations per second at best.
pub(super) fn matrix_at(
    case: &Case,
    rows: f64,
    [inputs, outputs]: [f64; 2],
    count: f64,
    rate: f64,
) -> Passes {
    let device = &case.cluster.accelerator;
    let flops = 2.0 * rows * inputs * outputs * count;
    // The host starts those of experts one by one.
    let (multiply, kernels): (Multiply, f64) = if count > 1.0 && device.matmul.overheads.is_none() {
        (grouped, count)
    } else {
        (matmul, 0.0)
    };
    let cost = |dims: [f64; 3], sums: bool| {
        let alone = multiply(device, dims, count, case.width, rate, sums);
        let size = (dims[0] * dims[1] * dims[2]).cbrt();
        let seconds = alone / case.measured(OpClass::Matmul, size).unwrap_or(1.0);
        Cost::of(OpClass::Matmul, seconds).with_flops(flops).with_kernels(kernels)
    };
    Passes {
        forward: cost([rows, inputs, outputs], false),
        again: Cost::default(),
        input: cost([rows, outputs, inputs], false),
        weights: cost([outputs, rows, inputs], true),
    }
}

fn attention_matrices(case: &Case) -> Passes {
    let out = matrix(case, case.tokens, [case.attended, case.dim], 1.0);
    let Some(latent) = case.latent else {
        let columns = case.queries + case.keys + case.values;
        return matrix(case, case.tokens, [case.dim, columns], 1.0) + out;
    };
    // Into the latents, of the rows that are here; out of them, of all.
    let keys = [latent.kv_rank as f64, case.unfolded()];
    matrix(case, case.rows, [case.dim, latent.replicated_columns() as f64], 1.0)
        + matrix(case, case.tokens, [case.from(), case.queries], 1.0)
        + matrix(case, case.tokens, keys, 1.0)
        + out
}

fn feed_forward(case: &Case) -> Passes {
    let both = |rows: f64, count: f64, times: f64| {
        matrix(case, rows, [case.dim, case.inner * times], count)
            + matrix(case, rows, [case.ffn * times, case.dim], count)
    };
    let Some(moe) = case.moe else { return both(case.tokens, 1.0, 1.0) };
    // Evenly used, the experts here see as many rows as are sent from here.
    let (here, [top_k, shared]) = (case.experts_here(), case.slots());
    let slots = case.tokens * top_k;
    let routed = both(slots / here, here, 1.0);
    let router = matrix(case, case.tokens / case.dealt, [case.dim, moe.experts as f64], 1.0);
    let shared = match moe.shared {
        0 => Passes::default(),
        _ => both(case.tokens, 1.0, shared),
    };
    routed + router + shared
}

/// Gate and up once more.
fn up(case: &Case) -> Cost {
    match case.moe {
        None => matrix(case, case.tokens, [case.dim, case.inner], 1.0).forward,
        Some(_) => feed_forward(case).forward * (case.inner / (case.inner + case.ffn)),
    }
}

/// Passes over memory, forward and backward: norms, positions, activations, dropout and residuals, in bytes per
/// number that they read and write.
fn streams(case: &Case) -> [Cost; 2] {
    let software = case.software();
    let w = case.width;
    let dropped = if case.shape().dropout > 0.0 { 1.0 } else { 0.0 };
    // Of each half: a norm, and the residual with bias and dropout.
    let stream = case.rows * case.dim * 2.0;
    let (normed, normed_back) = (stream * 2.0 * w, stream * 5.0 * w);
    let (mut added, mut added_back) = (stream * (3.0 * w + dropped), stream * (2.0 * w + dropped));
    if software.epilogues {
        // What the multiplies add on their way out is no pass of its own; norms pass the stream's gradient on.
        let biases = case.tokens * (case.queries + case.keys + case.values + case.inner) * w
            + case.rows * 2.0 * case.dim * w;
        added = stream * 2.0 * w * dropped;
        added_back = added + if case.gpt2() { biases } else { 0.0 };
    }
    // Queries and keys are turned, or cut from each other.
    // Those of a latent attention are put together from their parts besides.
    let times = if case.latent.is_some() { 2.0 } else { 1.0 };
    let turned = times * case.tokens * (case.queries + case.keys + case.values) * 2.0 * w;
    let turned = if software.epilogues && case.gpt2() { 0.0 } else { turned };
    let [routed, shared] = case.slots();
    let slots = routed + shared;
    let wide = case.tokens * slots * (case.inner + case.ffn) * w;
    let wide_back = case.tokens * slots * (2.0 * case.inner + 2.0 * case.ffn) * w;
    // Rows are put in the order of the ranks of their experts, there in that of the experts, and back, each once read
    // and once written, in no order that memory likes.
    let orders = if case.experts().members > 1 { 2.0 } else { 1.0 };
    let permuted =
        case.moe.map_or(0.0, |_| SCATTERED * 4.0 * orders * case.tokens * routed * case.dim * w);
    let cost =
        |kind: OpClass, bytes: f64| Cost::of(kind, software.unfused * bytes / case.pace(kind));
    let all = |norm: f64, elementwise: f64, activation: f64| {
        cost(OpClass::Norm, norm)
            + cost(OpClass::Elementwise, elementwise)
            + cost(OpClass::Rope, turned)
            + cost(OpClass::Activation, activation)
            + cost(OpClass::Routing, permuted)
    };
    [all(normed, added, wide), all(normed_back, added_back, wide_back)]
}

/// What moving rows in any order takes of what moving them in turn does: 0.50 of the bandwidth and not 0.67, measured on
/// a B200.
const SCATTERED: f64 = 1.33;
