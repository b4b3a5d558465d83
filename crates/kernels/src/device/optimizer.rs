//! The optimizer step.

use half::bf16;

use super::{Backend, Device, OpClass, with_float};
use crate::cpu::adamw;
use crate::cuda;
use crate::{View, ViewMut};

/// Hyperparameters of one AdamW step. Parameters with other hyperparameters, such as gains and biases without decay,
/// are separate calls.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// Number of the step; the first is 1.
    pub step: u64,
    /// Factor of the gradients, for clipping.
    pub scale: f64,
}

impl Default for AdamW {
    fn default() -> AdamW {
        AdamW {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            step: 1,
            scale: 1.0,
        }
    }
}

/// Parameters and moments that a step updates: flat, f32, of equal length.
pub struct OptimizerState<'a> {
    pub parameters: ViewMut<'a>,
    /// Receives the updated parameters in bf16.
    pub bf16_copy: Option<ViewMut<'a>>,
    pub first_moment: ViewMut<'a>,
    pub second_moment: ViewMut<'a>,
}

impl Device {
    /// One AdamW step.
    pub fn adamw(&self, settings: &AdamW, state: OptimizerState<'_>, gradient: View<'_>) {
        let OptimizerState { parameters, bf16_copy, first_moment, second_moment } = state;
        self.execute(OpClass::Optimizer, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(gradient.dtype(), G => {
                let (p, m, v) = (parameters.host(), first_moment.host(), second_moment.host());
                let bf16_copy = bf16_copy.map(|copy| copy.host::<bf16>());
                let state = adamw::State { p, m, v, bf16_copy };
                adamw::step::<G>(cpu, settings, state, gradient.host())
            }),
            Backend::Cuda(gpu) => {
                let state = OptimizerState { parameters, bf16_copy, first_moment, second_moment };
                cuda::optimizer::adamw(gpu, settings, state, gradient)
            }
        })
    }
}
