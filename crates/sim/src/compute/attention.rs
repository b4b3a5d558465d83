//! Compute time of attention, with or without FlashAttention.

use super::{Cost, MatmulCall, OpClass, matmul};
use crate::case::Case;

/// Forward and backward cost.
pub(crate) fn attention(case: &Case) -> [Cost; 2] {
    match case.software().flash {
        true => tiled(case),
        false => with_square(case),
    }
}

/// 2 · (head_dim + value_dim) FLOPs for every pair under the causal mask. The backward pass computes five products, the
/// forward pass two.
fn tiled(case: &Case) -> [Cost; 2] {
    let pairs = case.tokens * case.seq / 2.0 * case.queries / case.head_dim;
    let flops = 2.0 * pairs * (case.head_dim + case.value_dim);
    let rows = case.tokens * case.queries / case.head_dim;
    let (rate, reached) = (case.bf16_rate(), case.software().attention);
    let cost = |flops: f64, (best, half): (f64, f64)| {
        let seconds = flops / (rate * reached * best * rows / (rows + half));
        Cost::of(OpClass::Attention, seconds).with_flops(flops)
    };
    let device = &case.cluster.accelerator;
    let measured = case.measured(OpClass::Attention, case.size(OpClass::Attention));
    let (compute, deterministic) = (case.plan.precision.compute, case.plan.device.deterministic);
    let isolated = device.attention_rates.at(compute, deterministic, [case.head_dim, case.seq]);
    let [forward, backward] = match (isolated, measured) {
        (Some(rates), in_step) => rates.map(|rate| (rate * in_step.unwrap_or(1.0), 0.0)),
        (None, Some(reached)) => [(reached, 0.0); 2],
        (None, None) => device.attention,
    };
    let [there, back] = rounds(case);
    [cost(flops, forward) + there, cost(2.5 * flops, backward) + back]
}

/// Memory traffic of the further rounds of ring attention: forward, partial outputs are merged in f32; backward, partial
/// gradients of queries, keys and values are.
fn rounds(case: &Case) -> [Cost; 2] {
    let rounds = (case.mesh.context / case.mesh.ulysses) as f64 - 1.0;
    let rate = case.cluster.accelerator.stream_rate();
    let pass = |columns: f64, bytes: f64| {
        Cost::of(OpClass::Attention, rounds * case.tokens * columns * bytes / rate)
    };
    let gradients = case.queries + case.keys + case.values;
    [pass(case.attended, 8.0 + case.width), pass(gradients, 8.0 + case.width)]
}

/// Without FlashAttention: two matmuls per head over the full square, with scale, mask, softmax and dropout as
/// memory-bound operations between them. Backward has twice the matmuls.
fn with_square(case: &Case) -> [Cost; 2] {
    let device = &case.cluster.accelerator;
    let heads = case.batch * case.queries / case.head_dim;
    let (own, all) = (case.seq / case.mesh.context as f64, case.seq);
    let (each, value) = (case.head_dim, case.value_dim);
    let multiply = |dims: [f64; 3]| {
        let (width, rate) = (case.width, case.bf16_rate());
        matmul(device, &MatmulCall { dims, count: heads, width, rate, sums: false })
    };
    let (scores, sums) = (multiply([own, each, all]), multiply([own, all, value]));
    let flops = 2.0 * heads * own * all * (each + value);
    // Softmax reads and writes; dropout reads, writes, and writes its mask. Backward, each reads once more.
    let dropped = if case.shape().dropout > 0.0 { 1.0 } else { 0.0 };
    let (there, back) = (
        2.0 * case.width + dropped * (2.0 * case.width + 1.0),
        3.0 * case.width + dropped * (2.0 * case.width + 1.0),
    );
    let square = heads * own * all;
    let pass = |bytes: f64| square * bytes / device.stream_rate();
    let cost = |seconds: f64, flops: f64| Cost::of(OpClass::Attention, seconds).with_flops(flops);
    [
        cost(scores + sums + pass(there), flops),
        cost(2.0 * (scores + sums) + pass(back), 2.0 * flops),
    ]
}
