//! Compute time of one layer.

use lockstep_plan::Recompute;

use super::{Cost, MatmulCall, OpClass, Passes, attention::attention, grouped, matmul};
use crate::case::Case;
use crate::software::Selective;

/// Costs of a layer per micro-batch.
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
        (Recompute::None | Recompute::Cheap, _) => Cost::default(),
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

/// Forward, input gradient and weight gradient of `count` matrices (inputs, outputs), each applied to `rows` rows.
fn matrix(case: &Case, rows: f64, sizes: [f64; 2], count: f64) -> Passes {
    matrix_at(case, rows, sizes, count, case.matmul_rate())
}

/// The same with another peak rate.
pub(super) fn matrix_at(
    case: &Case,
    rows: f64,
    [inputs, outputs]: [f64; 2],
    count: f64,
    rate: f64,
) -> Passes {
    let device = &case.cluster.accelerator;
    let flops = 2.0 * rows * inputs * outputs * count;
    // The host launches the matmuls of experts one by one.
    let separate = count > 1.0 && device.matmul.overheads.is_none();
    let kernels = if separate { count } else { 0.0 };
    let cost = |dims: [f64; 3], sums: bool| {
        let call = MatmulCall { dims, count, width: case.width, rate, sums };
        let alone = if separate { grouped(device, &call) } else { matmul(device, &call) };
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
    // The down-projections see the rows of this rank, the up-projections all tokens.
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
    // With balanced experts, as many rows arrive at this rank's experts as it sends.
    let (here, [top_k, shared]) = (case.experts_here(), case.slots());
    let slots = case.tokens * top_k;
    let routed = both(slots / here, here, 1.0);
    let router =
        matrix(case, case.tokens / case.tensor_experts, [case.dim, moe.experts as f64], 1.0);
    let shared = match moe.shared {
        0 => Passes::default(),
        _ => both(case.tokens, 1.0, shared),
    };
    routed + router + shared
}

/// Recomputation of gate and up projection.
fn up(case: &Case) -> Cost {
    match case.moe {
        None => matrix(case, case.tokens, [case.dim, case.inner], 1.0).forward,
        Some(_) => feed_forward(case).forward * (case.inner / (case.inner + case.ffn)),
    }
}

/// Memory-bound operations, forward and backward: norms, rotary positions, activations, dropout and residuals.
fn streams(case: &Case) -> [Cost; 2] {
    let software = case.software();
    let w = case.width;
    let dropped = if case.shape().dropout > 0.0 { 1.0 } else { 0.0 };
    // Attention and feed-forward each have a norm, and a residual with bias and dropout.
    let stream = case.rows * case.dim * 2.0;
    let (normed, normed_back) = (stream * 2.0 * w, stream * 5.0 * w);
    let (mut added, mut added_back) = (stream * (3.0 * w + dropped), stream * (2.0 * w + dropped));
    if software.epilogues {
        // Epilogues of matmuls add bias and residual; norms pass the gradient of the stream on.
        let biases = case.tokens * (case.queries + case.keys + case.values + case.inner) * w
            + case.rows * 2.0 * case.dim * w;
        added = stream * 2.0 * w * dropped;
        added_back = added + if case.gpt2() { biases } else { 0.0 };
    }
    // Queries and keys are rotated, or split from each other. Latent attention also concatenates their parts.
    let times = if case.latent.is_some() { 2.0 } else { 1.0 };
    let turned = times * case.tokens * (case.queries + case.keys + case.values) * 2.0 * w;
    let turned = if software.epilogues && case.gpt2() { 0.0 } else { turned };
    let [routed, shared] = case.slots();
    let slots = routed + shared;
    let wide = case.tokens * slots * (case.inner + case.ffn) * w;
    let wide_back = case.tokens * slots * (2.0 * case.inner + 2.0 * case.ffn) * w;
    // Rows are permuted by rank of their expert, at the destination by expert, and back. Each permutation reads and
    // writes every row once, with scattered access.
    let orders = if case.experts().members > 1 { 2.0 } else { 1.0 };
    let permuted =
        case.moe.map_or(0.0, |_| SCATTERED * 4.0 * orders * case.tokens * routed * case.dim * w);
    let cost = |kind: OpClass, bytes: f64| {
        Cost::of(kind, software.unfused * bytes / case.stream_rate(kind))
    };
    let all = |norm: f64, elementwise: f64, activation: f64| {
        cost(OpClass::Norm, norm)
            + cost(OpClass::Elementwise, elementwise)
            + cost(OpClass::Rope, turned)
            + cost(OpClass::Activation, activation)
            + cost(OpClass::Routing, permuted)
    };
    [all(normed, added, wide), all(normed_back, added_back, wide_back)]
}

/// Slowdown of scattered rows: 0.50 instead of 0.67 of the bandwidth, measured on a B200.
const SCATTERED: f64 = 1.33;
