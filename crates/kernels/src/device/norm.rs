//! LayerNorm and RMSNorm.

use super::{Backend, Device, OpClass, with_float};
use crate::cpu::norm::{self, Backward};
use crate::{View, ViewMut};

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
                match params {
                    NormParams::Layer { gain, bias } => {
                        norm::layer_forward(cpu, x, gain.host(), bias.host(), eps, out, stats)
                    }
                    NormParams::Rms { gain } => norm::rms_forward(cpu, x, gain.host(), eps, out, stats),
                }
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
                match params {
                    NormParams::Layer { gain, bias } => {
                        norm::layer_recompute(cpu, x, gain.host(), bias.host(), stats, out)
                    }
                    NormParams::Rms { gain } => norm::rms_recompute(cpu, x, gain.host(), stats, out),
                }
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
                let (from, dx, dgain) = (Backward { x, gain, stats, dy }, dx.host(), dgain.host());
                match dbias {
                    Some(dbias) => {
                        norm::layer_backward(cpu, &from, dx, true, dgain, dbias.host(), accumulate)
                    }
                    None => norm::rms_backward(cpu, &from, dx, true, dgain, accumulate),
                }
            }),
        })
    }
}
