//! The optimizer step.

use std::ops::Range;

use half::bf16;

use super::{Backend, Device, OpClass, with_float};
use crate::cpu::adamw;
use crate::cuda;
use crate::{View, ViewMut};

/// Hyperparameters of one AdamW step.
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

impl<'a> OptimizerState<'a> {
    /// The state of a range of the parameters.
    pub fn part(&mut self, range: Range<usize>) -> OptimizerState<'_> {
        OptimizerState {
            parameters: self.parameters.reborrow().part(range.clone()),
            bf16_copy: self.bf16_copy.as_mut().map(|copy| copy.reborrow().part(range.clone())),
            first_moment: self.first_moment.reborrow().part(range.clone()),
            second_moment: self.second_moment.reborrow().part(range),
        }
    }

    fn host(self) -> adamw::State<'a> {
        adamw::State {
            p: self.parameters.host(),
            m: self.first_moment.host(),
            v: self.second_moment.host(),
            bf16_copy: self.bf16_copy.map(|copy| copy.host::<bf16>()),
        }
    }
}

impl Device {
    /// One AdamW step.
    pub fn adamw(&self, settings: &AdamW, state: OptimizerState<'_>, gradient: View<'_>) {
        let all = 0..gradient.len();
        self.adamw_runs(settings, state, gradient, &[(all, true)]);
    }

    /// One AdamW step of the elements in `runs`, each with whether weight decay applies to it.
    pub fn adamw_runs(
        &self,
        settings: &AdamW,
        mut state: OptimizerState<'_>,
        gradient: View<'_>,
        runs: &[(Range<usize>, bool)],
    ) {
        self.execute(OpClass::Optimizer, |backend| match backend {
            Backend::Cpu(cpu) => {
                for (run, decays) in runs {
                    let weight_decay = if *decays { settings.weight_decay } else { 0.0 };
                    let settings = AdamW { weight_decay, ..*settings };
                    let (state, gradient) = (state.part(run.clone()), gradient.part(run.clone()));
                    with_float!(gradient.dtype(), G => {
                        adamw::step::<G>(cpu, &settings, state.host(), gradient.host())
                    })
                }
            }
            Backend::Cuda(gpu) => cuda::optimizer::adamw(gpu, settings, state, gradient, runs),
        })
    }
}
