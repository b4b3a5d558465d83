//! The data axis: every rank holds the whole model and trains on its own part of the global batch.

use lockstep_comm::{Group, Op, Result};
use lockstep_kernels::Tensor;

/// Sums gradients over the ranks, in place: afterwards all hold the same bits. Ranks scale their gradients
/// by the tokens of the *global* batch, so the sum is the gradient of its mean.
///
/// One all-reduce per buffer: 2(P-1)/P of all gradients per rank, where the algorithm is a ring.
pub fn sum_gradients<'a>(
    group: &Group,
    gradients: impl Iterator<Item = &'a mut Tensor>,
) -> Result<()> {
    for gradient in gradients {
        group.all_reduce(gradient.view_mut().host::<f32>(), Op::Sum)?;
    }
    Ok(())
}

/// Sums a few numbers over the ranks.
pub fn sum(group: &Group, numbers: &mut [f64]) -> Result<()> {
    group.all_reduce(numbers, Op::Sum)
}
