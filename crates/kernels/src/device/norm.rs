//! LayerNorm and RMSNorm.

use super::{Device, OpClass, with_float};
use crate::cpu::norm::{self, Backward};
use crate::{View, ViewMut};

impl Device {
    /// Normalises each row of `x` to mean 0 and variance 1, times `gain`, plus `bias`. `stats` (rows, 2)
    /// receives what the backward pass needs.
    pub fn layer_norm(
        &self,
        x: View<'_>,
        gain: View<'_>,
        bias: View<'_>,
        eps: f32,
        out: ViewMut<'_>,
        stats: ViewMut<'_>,
    ) {
        with_float!(x.dtype(), E => self.on_cpu(OpClass::Norm, |cpu| {
            norm::layer_forward::<E>(cpu, x.host(), gain.host(), bias.host(), eps, out.host(), Some(stats.host()))
        }))
    }

    /// The forward's output once more, bit for bit.
    pub fn layer_norm_again(
        &self,
        x: View<'_>,
        gain: View<'_>,
        bias: View<'_>,
        stats: View<'_>,
        out: ViewMut<'_>,
    ) {
        with_float!(x.dtype(), E => self.on_cpu(OpClass::Norm, |cpu| {
            norm::layer_again::<E>(cpu, x.host(), gain.host(), bias.host(), stats.host(), out.host())
        }))
    }

    /// Adds the input's gradient to `dx`; the parameters' are written, or added with `accumulate`.
    #[allow(clippy::too_many_arguments)] // what came in, what came out, and a gradient for each
    pub fn layer_norm_backward(
        &self,
        x: View<'_>,
        gain: View<'_>,
        stats: View<'_>,
        dy: View<'_>,
        dx: ViewMut<'_>,
        dgain: ViewMut<'_>,
        dbias: ViewMut<'_>,
        accumulate: bool,
    ) {
        with_float!(x.dtype(), E => self.on_cpu(OpClass::Norm, |cpu| {
            let from = Backward::<E> { x: x.host(), gain: gain.host(), stats: stats.host(), dy: dy.host() };
            norm::layer_backward(cpu, &from, dx.host(), true, dgain.host(), dbias.host(), accumulate)
        }))
    }

    /// Normalises each row of `x` to a mean square of 1, times `gain`. `stats` (rows, 1) receives what the
    /// backward pass needs.
    pub fn rms_norm(
        &self,
        x: View<'_>,
        gain: View<'_>,
        eps: f32,
        out: ViewMut<'_>,
        stats: ViewMut<'_>,
    ) {
        with_float!(x.dtype(), E => self.on_cpu(OpClass::Norm, |cpu| {
            norm::rms_forward::<E>(cpu, x.host(), gain.host(), eps, out.host(), Some(stats.host()))
        }))
    }

    /// The forward's output once more, bit for bit.
    pub fn rms_norm_again(&self, x: View<'_>, gain: View<'_>, stats: View<'_>, out: ViewMut<'_>) {
        with_float!(x.dtype(), E => self.on_cpu(OpClass::Norm, |cpu| {
            norm::rms_again::<E>(cpu, x.host(), gain.host(), stats.host(), out.host())
        }))
    }

    /// Adds the input's gradient to `dx`; the gain's is written, or added with `accumulate`.
    #[allow(clippy::too_many_arguments)] // as above
    pub fn rms_norm_backward(
        &self,
        x: View<'_>,
        gain: View<'_>,
        stats: View<'_>,
        dy: View<'_>,
        dx: ViewMut<'_>,
        dgain: ViewMut<'_>,
        accumulate: bool,
    ) {
        with_float!(x.dtype(), E => self.on_cpu(OpClass::Norm, |cpu| {
            let from = Backward::<E> { x: x.host(), gain: gain.host(), stats: stats.host(), dy: dy.host() };
            norm::rms_backward(cpu, &from, dx.host(), true, dgain.host(), accumulate)
        }))
    }
}
