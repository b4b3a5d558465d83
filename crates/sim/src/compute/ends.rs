//! The ends of a model in time, and the optimizer.

use super::layer::matrix_at;
use super::{Cost, OpClass, Passes};
use crate::case::Case;

/// Rows of the table, there and back; its gradient is zeroed and added to once for each micro-batch.
pub(crate) fn embed(case: &Case) -> Passes {
    let rate = case.pace(OpClass::Embedding);
    let rows = case.rows * case.dim * 3.0 * case.width;
    let table = case.vocab * case.dim * 4.0 * case.width;
    let cost =
        |bytes: f64, kernels: f64| Cost::of(OpClass::Embedding, bytes / rate).with_kernels(kernels);
    Passes { forward: cost(rows, 6.0), input: cost(rows + table, 6.0), ..Passes::default() }
}

/// Logits, loss and back.
pub(crate) fn head(case: &Case) -> Passes {
    let projected = matrix_at(case, case.tokens, [case.dim, case.vocab], 1.0, case.wide_rate());
    let moved = case.tokens * case.vocab * case.software().logits[1];
    let loss = Cost::of(OpClass::Loss, moved / 2.0 / case.pace(OpClass::Loss)).with_kernels(12.0);
    // The last norm, there and back.
    let normed = |width: f64| {
        let bytes = case.software().unfused * case.rows * case.dim * width * case.width;
        Cost::of(OpClass::Norm, bytes / case.pace(OpClass::Norm))
    };
    let (there, back) = (loss + normed(2.0), loss + normed(5.0));
    projected + Passes { forward: there, input: back, ..Passes::default() }
}

/// Seconds of stepping so many parameters.
pub(crate) fn optimizer(case: &Case, params: f64) -> f64 {
    params * case.software().stepped / case.pace_at(OpClass::Optimizer, params)
}
