//! The optimizer step.

use super::elementwise::{count, float_kernel, optional, vectors};
use super::{Cuda, Source};
use crate::cpu::adamw::Factors;
use crate::{AdamW, Dtype, OptimizerState, View};

pub(crate) const OPTIMIZER: Source =
    Source { name: "optimizer", code: include_str!("kernels/optimizer.cu") };

/// One AdamW step, with the arithmetic of the CPU.
pub(crate) fn adamw(cuda: &Cuda, settings: &AdamW, state: OptimizerState<'_>, gradient: View<'_>) {
    let OptimizerState { parameters, bf16_copy, first_moment, second_moment } = state;
    let n = gradient.len();
    for state in [&parameters, &first_moment, &second_moment] {
        assert_eq!((state.len(), state.dtype()), (n, Dtype::F32), "{n} gradients for {state:?}");
    }
    if let Some(copy) = &bf16_copy {
        assert_eq!((copy.len(), copy.dtype()), (n, Dtype::Bf16), "{n} gradients for {copy:?}");
    }
    let kernel = match bf16_copy {
        Some(_) => float_kernel!("adamw_and_copy", gradient.dtype()),
        None => float_kernel!("adamw", gradient.dtype()),
    };
    let f: Factors = settings.factors();
    let args = [
        parameters.into(),
        first_moment.into(),
        second_moment.into(),
        gradient.into(),
        optional(bf16_copy.as_ref().map(|copy| copy.as_view())),
        count(n),
        f.decay.into(),
        f.one_minus_beta1.into(),
        f.beta2.into(),
        f.one_minus_beta2.into(),
        f.step_size.into(),
        f.correction2.into(),
        f.eps.into(),
        f.scale.into(),
    ];
    cuda.launch(&OPTIMIZER, kernel, vectors(n, Dtype::F32, 1), &args);
}
