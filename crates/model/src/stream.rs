//! The residual stream: how the halves of a layer write into it.

use lockstep_kernels::{Matmul, Tag, Tensor, View};
use lockstep_parallel::Entering;

use crate::Ctx;
use crate::linear::Linear;

/// x + dropout(linear(input)): the stream after a half. Each rank of the tensor axis has a part of the
/// product's sum.
pub(crate) fn add_projection(
    cx: &Ctx<'_>,
    site: u64,
    linear: &Linear,
    weights: View<'_>,
    input: View<'_>,
    x: &Tensor,
) -> Tensor {
    let (device, groups) = (cx.device, cx.groups);
    // The sum is made while the product is still in registers, where the stream is all here.
    let at_once = cx.dropout.is_none() && !groups.sequence;
    let leaving = cx.leaving(x.cols(), Tag::Activations);
    let mut y = groups.leave_with(device, leaving, |rows, y| {
        let project = linear.forward(weights, input.rows_of(rows), y);
        device.matmul(Matmul {
            bias: project.bias.filter(|_| groups.adds()),
            residual: (at_once && groups.adds()).then(|| x.view()),
            ..project
        });
    });
    if !at_once {
        cx.drop_out(site, &mut y);
        device.add(y.view_mut(), x.view());
    }
    y
}

/// The gradient of the projection for all tokens, given that of the stream: the same memory unless something
/// was dropped or is elsewhere.
pub(crate) fn projection_gradient<'p>(cx: &Ctx<'p>, site: u64, dy: &Tensor) -> Entering<'p> {
    let shared = dy.clone();
    let own = match cx.dropout {
        None => shared,
        Some(_) => {
            let mut own = cx.own(shared);
            cx.drop_out(site, &mut own);
            own
        }
    };
    cx.groups.start_enter(cx.device, own)
}
