//! The residual stream: how the halves of a layer write into it.

use lockstep_kernels::{Matmul, Tensor, View};

use crate::Cx;
use crate::linear::Linear;

/// x + dropout(linear(input)): the stream after a half.
pub(crate) fn add_projection(
    cx: &Cx<'_>,
    site: u64,
    linear: &Linear,
    weights: View<'_>,
    input: View<'_>,
    x: &Tensor,
) -> Tensor {
    let mut y = cx.kept(x.cols());
    let project = linear.forward(weights, input, y.view_mut());
    if cx.dropout.is_none() {
        // The sum is made while the product is still in registers.
        cx.device.matmul(Matmul { residual: Some(x.view()), ..project });
    } else {
        cx.device.matmul(project);
        cx.drop_out(site, &mut y);
        cx.device.add(y.view_mut(), x.view());
    }
    y
}

/// The gradient of the projection, given that of the stream: the same memory unless something was dropped.
pub(crate) fn projection_gradient(cx: &Cx<'_>, site: u64, dy: &Tensor) -> Tensor {
    let shared = dy.clone();
    if cx.dropout.is_none() {
        return shared;
    }
    let mut own = cx.own(shared);
    cx.drop_out(site, &mut own);
    own
}
