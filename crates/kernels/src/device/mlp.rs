//! Activation functions of the MLP.

use super::{Backend, Device, OpClass, with_float};
use crate::cpu::{gelu, swiglu};
use crate::cuda::mlp;
use crate::{View, ViewMut};

impl Device {
    /// GELU in the tanh approximation of GPT-2.
    pub fn gelu(&self, x: View<'_>, out: ViewMut<'_>) {
        self.execute(OpClass::Activation, |backend| match backend {
            Backend::Cpu(cpu) => {
                with_float!(x.dtype(), E => gelu::forward::<E>(cpu, x.host(), out.host()))
            }
            Backend::Cuda(gpu) => mlp::gelu(gpu, x, out),
        })
    }

    /// Replaces the gradient `d` of GELU's output by the gradient of its input `x`.
    pub fn gelu_backward(&self, x: View<'_>, d: ViewMut<'_>) {
        self.execute(OpClass::Activation, |backend| match backend {
            Backend::Cpu(cpu) => {
                with_float!(x.dtype(), E => gelu::backward_in_place::<E>(cpu, x.host(), d.host()))
            }
            Backend::Cuda(gpu) => mlp::gelu_backward(gpu, x, d),
        })
    }

    /// `silu(gate) * up`, where each row of `gate_up` holds gate, then up.
    pub fn swiglu(&self, gate_up: View<'_>, out: ViewMut<'_>) {
        let width = out.cols();
        self.execute(OpClass::Activation, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(gate_up.dtype(), E => {
                swiglu::forward::<E>(cpu, gate_up.host(), width, out.host())
            }),
            Backend::Cuda(gpu) => mlp::swiglu(gpu, gate_up, out),
        })
    }

    /// Gradient of `gate_up`.
    pub fn swiglu_backward(&self, gate_up: View<'_>, dout: View<'_>, dgate_up: ViewMut<'_>) {
        let width = dout.cols();
        self.execute(OpClass::Activation, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(gate_up.dtype(), E => {
                swiglu::backward::<E>(cpu, gate_up.host(), width, dout.host(), dgate_up.host())
            }),
            Backend::Cuda(gpu) => mlp::swiglu_backward(gpu, gate_up, dout, dgate_up),
        })
    }
}
