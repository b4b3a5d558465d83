//! Activation functions of the MLP.

use super::elementwise::{count, float_kernel, vectors};
use super::{Cuda, Source};
use crate::{View, ViewMut};

pub(crate) const MLP: Source = Source {
    name: "mlp",
    code: concat!(include_str!("kernels/activation.cuh"), "\n", include_str!("kernels/mlp.cu")),
};

pub(crate) fn gelu(cuda: &Cuda, x: View<'_>, out: ViewMut<'_>) {
    assert_eq!((x.len(), x.dtype()), (out.len(), out.dtype()), "gelu of {x:?} to {out:?}");
    let (n, kernel) = (x.len(), float_kernel!("gelu", x.dtype()));
    cuda.launch(&MLP, kernel, vectors(n, x.dtype(), 2), &[x.into(), out.into(), count(n)]);
}

pub(crate) fn gelu_in_place(cuda: &Cuda, x: ViewMut<'_>) {
    let (n, kernel) = (x.len(), float_kernel!("gelu", x.dtype()));
    cuda.launch(&MLP, kernel, vectors(n, x.dtype(), 2), &[(&x).into(), (&x).into(), count(n)]);
}

/// Replaces the gradient `d` of the output by the gradient of the input `x`.
pub(crate) fn gelu_backward(cuda: &Cuda, x: View<'_>, d: ViewMut<'_>) {
    assert_eq!((x.len(), x.dtype()), (d.len(), d.dtype()), "gelu of {x:?} with gradient {d:?}");
    let (n, kernel) = (x.len(), float_kernel!("gelu_backward", x.dtype()));
    cuda.launch(&MLP, kernel, vectors(n, x.dtype(), 2), &[x.into(), d.into(), count(n)]);
}

pub(crate) fn swiglu(cuda: &Cuda, gate_up: View<'_>, out: ViewMut<'_>) {
    let (rows, f, grid) = (out.rows(), out.cols(), vectors(out.len(), out.dtype(), 2));
    check_halves(gate_up, out.as_view());
    let args = [gate_up.into(), out.into(), count(rows), count(f)];
    cuda.launch(&MLP, float_kernel!("swiglu", gate_up.dtype()), grid, &args);
}

pub(crate) fn swiglu_backward(cuda: &Cuda, gate_up: View<'_>, dy: View<'_>, dgate_up: ViewMut<'_>) {
    let (rows, f, grid) = (dy.rows(), dy.cols(), vectors(dy.len(), dy.dtype(), 2));
    check_halves(gate_up, dy);
    check_halves(dgate_up.as_view(), dy);
    let args = [gate_up.into(), dy.into(), dgate_up.into(), count(rows), count(f)];
    cuda.launch(&MLP, float_kernel!("swiglu_backward", gate_up.dtype()), grid, &args);
}

/// Each element of `out` has a gate and an up.
fn check_halves(gate_up: View<'_>, out: View<'_>) {
    assert_eq!(
        (gate_up.len(), gate_up.dtype()),
        (2 * out.len(), out.dtype()),
        "gate_up must have two elements for each of {out:?}"
    );
}
