//! The ends of a model in time, and the optimizer.

use super::layer::matrix_at;
use super::{Cost, Passes};
use crate::case::Case;

/// Rows of the table, there and back; its gradient is zeroed and added to once for each micro-batch.
pub(crate) fn embed(case: &Case) -> Passes {
    let rate = case.cluster.accelerator.stream_rate();
    let rows = case.rows * case.dim * 3.0 * case.width;
    let table = case.vocab * case.dim * 4.0 * case.width;
    let cost = |bytes: f64, kernels: f64| Cost { seconds: bytes / rate, flops: 0.0, kernels };
    Passes { forward: cost(rows, 6.0), input: cost(rows + table, 6.0), ..Passes::default() }
}

/// Logits, loss and back.
pub(crate) fn head(case: &Case) -> Passes {
    let projected = matrix_at(case, case.tokens, [case.dim, case.vocab], 1.0, case.wide_rate());
    let moved = case.tokens * case.vocab * case.software().logits[1];
    let seconds = moved / 2.0 / case.cluster.accelerator.stream_rate();
    let loss = Cost { seconds, flops: 0.0, kernels: 12.0 };
    projected + Passes { forward: loss, input: loss, ..Passes::default() }
}

/// Seconds of stepping so many parameters.
pub(crate) fn optimizer(case: &Case, params: f64) -> f64 {
    params * case.software().stepped / case.cluster.accelerator.stream_rate()
}
