//! Compute time of embedding, head and optimizer.

use super::layer::matrix_at;
use super::{Cost, OpClass, Passes};
use crate::case::Case;

/// Bytes of host memory that AdamW reads and writes per parameter: gradient, master, moments and compute copy.
const HOST_BYTES: f64 = 4.0 + 2.0 * 12.0 + 2.0;

/// Embedding lookup and its gradient. The gradient of the table is cleared and accumulated once per micro-batch.
pub(crate) fn embed(case: &Case) -> Passes {
    let rate = case.stream_rate(OpClass::Embedding);
    let rows = case.rows * case.dim * 3.0 * case.width;
    let table = case.vocab * case.dim * 4.0 * case.width;
    let cost =
        |bytes: f64, kernels: f64| Cost::of(OpClass::Embedding, bytes / rate).with_kernels(kernels);
    Passes { forward: cost(rows, 6.0), input: cost(rows + table, 6.0), ..Passes::default() }
}

/// Logits and loss, forward and backward.
pub(crate) fn head(case: &Case) -> Passes {
    let projected = matrix_at(case, case.tokens, [case.dim, case.vocab], 1.0, case.bf16_rate());
    let moved = case.tokens * case.vocab * case.software().logits[1];
    let loss =
        Cost::of(OpClass::Loss, moved / 2.0 / case.stream_rate(OpClass::Loss)).with_kernels(12.0);
    // The final norm, forward and backward.
    let normed = |width: f64| {
        let bytes = case.software().unfused * case.rows * case.dim * width * case.width;
        Cost::of(OpClass::Norm, bytes / case.stream_rate(OpClass::Norm))
    };
    let (there, back) = (loss + normed(2.0), loss + normed(5.0));
    projected + Passes { forward: there, input: back, ..Passes::default() }
}

/// Seconds of the optimizer step for `params` parameters. On the host, copies of gradients and parameters overlap with
/// the updates of other blocks.
pub(crate) fn optimizer(case: &Case, params: f64) -> f64 {
    if case.offloads().optimizer() {
        let device = &case.cluster.accelerator;
        let update = params * HOST_BYTES / device.host_bandwidth_gbs;
        let copies = params * case.software().gradients.max(case.width) / device.host_link_gbs;
        return update.max(copies) * 1e-9;
    }
    params * case.software().stepped / case.stream_rate_at(OpClass::Optimizer, params)
}
