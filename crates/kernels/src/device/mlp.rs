//! Activation functions of the feed-forward part.

use super::{Device, OpClass, with_float};
use crate::cpu::{gelu, swiglu};
use crate::{View, ViewMut};

impl Device {
    /// GELU in its tanh form, as GPT-2 has it.
    pub fn gelu(&self, x: View<'_>, out: ViewMut<'_>) {
        with_float!(x.dtype(), E => self.on_cpu(OpClass::Activation, |cpu| {
            gelu::forward::<E>(cpu, x.host(), out.host())
        }))
    }

    /// Turns the gradient of GELU's output into that of its input `x`, in place.
    pub fn gelu_backward(&self, x: View<'_>, d: ViewMut<'_>) {
        with_float!(x.dtype(), E => self.on_cpu(OpClass::Activation, |cpu| {
            gelu::backward_in_place::<E>(cpu, x.host(), d.host())
        }))
    }

    /// silu(gate) * up, of rows that hold gate and up side by side.
    pub fn swiglu(&self, gate_up: View<'_>, out: ViewMut<'_>) {
        let width = out.cols();
        with_float!(gate_up.dtype(), E => self.on_cpu(OpClass::Activation, |cpu| {
            swiglu::forward::<E>(cpu, gate_up.host(), width, out.host())
        }))
    }

    /// From the gradient of the output to that of gate and up, side by side.
    pub fn swiglu_backward(&self, gate_up: View<'_>, dout: View<'_>, dgate_up: ViewMut<'_>) {
        let width = dout.cols();
        with_float!(gate_up.dtype(), E => self.on_cpu(OpClass::Activation, |cpu| {
            swiglu::backward::<E>(cpu, gate_up.host(), width, dout.host(), dgate_up.host())
        }))
    }
}
