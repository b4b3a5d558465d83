//! LayerNorm and RMSNorm.

use super::{Backend, Device, OpClass, with_float};
use crate::cpu::norm::{self, Backward, Gradients, Params};
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
