//! The residual stream: how attention and feed-forward add their outputs to it.

use lockstep_kernels::{Fp8Tensor, Matmul, Tag, Tensor, View};
use lockstep_parallel::SequenceGather;

use crate::Ctx;
use crate::linear::Linear;

/// The input of a projection.
#[derive(Clone, Copy)]
pub(crate) enum ProjectionInput<'a> {
    Whole(View<'a>),
    Fp8(&'a Fp8Tensor),
}

/// x + dropout(linear(input)). Each rank of the tensor axis computes a part of the product's sum.
pub(crate) fn add_projection(
    cx: &Ctx<'_>,
    site: u64,
    linear: &Linear,
    input: ProjectionInput<'_>,
    x: &Tensor,
) -> Tensor {
    let (device, groups) = (cx.device, cx.groups);
    // The multiply adds the residual in its epilogue if this rank holds the whole stream.
    let fused = cx.dropout.is_none() && !groups.sequence;
    let output = cx.partial_output(x.cols(), Tag::Activations);
    let mut y = groups.reduce_output_with(device, output, |rows, y| {
        let residual = (fused && groups.is_tensor_root()).then(|| x.view());
        match input {
            ProjectionInput::Whole(input) => {
                let project = linear.forward(cx, input.rows_of(rows), y);
                let bias = project.bias.filter(|_| groups.is_tensor_root());
                device.matmul(Matmul { bias, residual, ..project });
            }
            ProjectionInput::Fp8(input) => linear.fp8_forward(cx, input, residual, y),
        }
    });
    if !fused {
        cx.drop_out(site, &mut y);
        device.add(y.view_mut(), x.view());
    }
    y
}

/// The gradient of the projection for all tokens, given that of the stream. It uses the same memory unless there is
/// dropout or the rows are on several ranks.
pub(crate) fn projection_gradient<'p>(cx: &Ctx<'p>, site: u64, dy: &Tensor) -> SequenceGather<'p> {
    let shared = dy.clone();
    let own = match cx.dropout {
        None => shared,
        Some(_) => {
            let mut own = cx.writable(shared);
            cx.drop_out(site, &mut own);
            own
        }
    };
    cx.groups.start_gather_sequence(cx.device, own)
}
