//! The optimizer's step, and what is asked of gradients before it.

use half::bf16;

use super::{Device, OpClass, with_float};
use crate::cpu::adamw;
use crate::cpu::reduce;
use crate::{View, ViewMut};

pub use crate::cpu::adamw::AdamW;

/// What a step changes: flat, f32, of one length.
pub struct Stepped<'a> {
    pub parameters: ViewMut<'a>,
    /// Receives the new parameters in bf16.
    pub copy: Option<ViewMut<'a>>,
    pub first: ViewMut<'a>,
    pub second: ViewMut<'a>,
}

impl Device {
    /// One step of AdamW: parameters and moments follow the gradient.
    pub fn adamw(&self, numbers: &AdamW, state: Stepped<'_>, gradient: View<'_>) {
        let Stepped { parameters, copy, first, second } = state;
        with_float!(gradient.dtype(), G => self.on_cpu(OpClass::Optimizer, |cpu| {
            let copy = copy.map(|copy| copy.host::<bf16>());
            adamw::step::<G>(cpu, numbers, parameters.host(), first.host(), second.host(), gradient.host(), copy)
        }))
    }

    /// Waits for it.
    pub fn sum_of_squares(&self, x: View<'_>) -> f64 {
        with_float!(x.dtype(), E => {
            self.on_cpu(OpClass::Optimizer, |cpu| reduce::sum_of_squares::<E>(cpu, x.host()))
        })
    }

    /// How many elements are infinite or no numbers; waits for it.
    pub fn count_not_finite(&self, x: View<'_>) -> u64 {
        with_float!(x.dtype(), E => {
            self.on_cpu(OpClass::Elementwise, |cpu| reduce::count_non_finite::<E>(cpu, x.host()))
        })
    }
}
