//! LayerNorm and RMSNorm.

use super::{Backend, Device, OpClass, with_float};
use crate::cpu::elementwise;
use crate::cpu::norm::{self, Backward, Gradients, Params};
use crate::cpu::reduce;
use crate::cuda::norm as gpu_norm;
use crate::{Float, View, ViewMut};

/// A normalization of rows, with its parameters.
#[derive(Clone, Copy)]
pub enum NormParams<'a> {
    /// `(x - mean) / sqrt(variance + eps) * gain + bias`. Its statistics are (rows, 2).
    Layer { gain: View<'a>, bias: View<'a> },
    /// `x / sqrt(mean of squares + eps) * gain`. Its statistics are (rows, 1).
    Rms { gain: View<'a> },
}

/// Gradients of a norm's parameters.
pub struct NormGradients<'a> {
    pub gain: ViewMut<'a>,
    /// For LayerNorm only.
    pub bias: Option<ViewMut<'a>>,
    /// Add to the gradients instead of overwriting them.
    pub accumulate: bool,
}

impl Device {
    /// Normalizes each row of `x`. `stats`, f32, receives the statistics for the backward pass.
    pub fn norm(
        &self,
        params: NormParams<'_>,
        x: View<'_>,
        eps: f32,
        out: ViewMut<'_>,
        stats: ViewMut<'_>,
    ) {
        self.execute(OpClass::Norm, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(x.dtype(), E => {
                let (x, out, stats) = (x.host::<E>(), out.host(), Some(stats.host()));
                norm::forward(cpu, host_params(params, eps), x, out, stats)
            }),
            Backend::Cuda(gpu) => {
                let work = gpu_norm::Forward { params, x, branch: None, eps, out, stats };
                gpu_norm::forward(gpu, work)
            }
        })
    }

    /// Adds `branch` to the residual stream `x` and normalizes the sum.
    pub fn add_norm(
        &self,
        params: NormParams<'_>,
        [mut x, out, stats]: [ViewMut<'_>; 3],
        branch: View<'_>,
        eps: f32,
    ) {
        self.execute(OpClass::Norm, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(branch.dtype(), E => {
                elementwise::add::<E, E>(cpu, x.reborrow().host(), branch.host());
                let (x, out, stats) = (x.as_view().host::<E>(), out.host(), Some(stats.host()));
                norm::forward(cpu, host_params(params, eps), x, out, stats)
            }),
            Backend::Cuda(gpu) => {
                let (x, branch) = (x.as_view(), Some(branch));
                gpu_norm::forward(gpu, gpu_norm::Forward { params, x, branch, eps, out, stats })
            }
        })
    }

    /// Recomputes the output of the forward pass from its statistics, with identical bits.
    pub fn norm_recompute(
        &self,
        params: NormParams<'_>,
        x: View<'_>,
        stats: View<'_>,
        out: ViewMut<'_>,
    ) {
        self.execute(OpClass::Norm, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(x.dtype(), E => {
                let (x, stats, out) = (x.host::<E>(), stats.host(), out.host());
                norm::recompute(cpu, host_params(params, 0.0), x, stats, out)
            }),
            Backend::Cuda(gpu) => gpu_norm::recompute(gpu, params, x, stats, out),
        })
    }

    /// Adds the gradient of the input to `dx` and computes the gradients of the parameters. A LayerNorm is one whose
    /// gradients have a bias.
    pub fn norm_backward(
        &self,
        [x, gain, stats]: [View<'_>; 3],
        dy: View<'_>,
        dx: ViewMut<'_>,
        gradients: NormGradients<'_>,
    ) {
        let NormGradients { gain: dgain, bias: dbias, accumulate } = gradients;
        self.execute(OpClass::Norm, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(x.dtype(), E => {
                let (x, gain, stats, dy) = (x.host::<E>(), gain.host(), stats.host(), dy.host());
                let from = Backward { x, gain, stats, dy };
                let (gain, bias) = (dgain.host(), dbias.map(|dbias| dbias.host()));
                norm::backward(cpu, &from, dx.host(), true, Gradients { gain, bias, accumulate })
            }),
            Backend::Cuda(gpu) => {
                let from = gpu_norm::Backward { x, gain, stats, dy };
                let gradients = NormGradients { gain: dgain, bias: dbias, accumulate };
                gpu_norm::backward(gpu, from, dx, gradients, None)
            }
        })
    }

    /// `norm_backward`, and the sums of the columns of the new `dx`: the gradient of the bias of the linear layer whose
    /// output was added to `x`. `accumulate` applies to them too.
    pub fn norm_backward_and_sum(
        &self,
        [x, gain, stats]: [View<'_>; 3],
        dy: View<'_>,
        mut dx: ViewMut<'_>,
        gradients: NormGradients<'_>,
        dx_sums: ViewMut<'_>,
    ) {
        let NormGradients { gain: dgain, bias: dbias, accumulate } = gradients;
        self.execute(OpClass::Norm, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(x.dtype(), E => {
                let (x, gain, stats, dy) = (x.host::<E>(), gain.host(), stats.host(), dy.host());
                let from = Backward { x, gain, stats, dy };
                let (gain, bias) = (dgain.host(), dbias.map(|dbias| dbias.host()));
                let gradients = Gradients { gain, bias, accumulate };
                norm::backward(cpu, &from, dx.reborrow().host(), true, gradients);
                reduce::column_sums::<E>(cpu, dx.as_view().host(), dx_sums.host(), accumulate)
            }),
            Backend::Cuda(gpu) => {
                let from = gpu_norm::Backward { x, gain, stats, dy };
                let gradients = NormGradients { gain: dgain, bias: dbias, accumulate };
                gpu_norm::backward(gpu, from, dx, gradients, Some(dx_sums))
            }
        })
    }
}

fn host_params<E: Float>(params: NormParams<'_>, eps: f32) -> Params<'_, E> {
    match params {
        NormParams::Layer { gain, bias } => {
            Params { gain: gain.host(), bias: Some(bias.host()), eps }
        }
        NormParams::Rms { gain } => Params { gain: gain.host(), bias: None, eps },
    }
}
