//! How long computing takes on one rank: matrix multiplies, attention, and passes over memory. Knows nothing of
//! other ranks but what they leave to this one.

mod attention;
mod class;
mod ends;
mod layer;
mod matmul;

pub(crate) use attention::attention;
pub use class::{ByClass, OpClass, same_in_all_families};
pub(crate) use ends::{embed, head, optimizer};
pub(crate) use layer::layer;
pub use matmul::{grouped, matmul};

use std::ops::{Add, Mul};

/// What some kernels cost.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Cost {
    /// Of the device, in seconds.
    pub seconds: f64,
    /// Operations of matrix multiplies and attention, as they are done.
    pub flops: f64,
    /// Kernels that the host starts.
    pub kernels: f64,
    /// The seconds, by what they go to.
    pub by: ByClass,
}

impl Cost {
    pub fn of(kind: OpClass, seconds: f64) -> Cost {
        let mut by = ByClass::default();
        by[kind as usize] = seconds;
        Cost { seconds, by, ..Cost::default() }
    }

    pub fn with_flops(self, flops: f64) -> Cost {
        Cost { flops, ..self }
    }

    pub fn with_kernels(self, kernels: f64) -> Cost {
        Cost { kernels, ..self }
    }
}

impl Add for Cost {
    type Output = Cost;

    fn add(self, other: Cost) -> Cost {
        Cost {
            seconds: self.seconds + other.seconds,
            flops: self.flops + other.flops,
            kernels: self.kernels + other.kernels,
            by: std::array::from_fn(|kind| self.by[kind] + other.by[kind]),
        }
    }
}

impl Mul<f64> for Cost {
    type Output = Cost;

    fn mul(self, times: f64) -> Cost {
        Cost {
            seconds: self.seconds * times,
            flops: self.flops * times,
            kernels: self.kernels * times,
            by: self.by.map(|seconds| seconds * times),
        }
    }
}

/// The passes of a block over a micro-batch.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Passes {
    pub forward: Cost,
    /// What the backward pass does again first.
    pub again: Cost,
    /// The gradient of the input, and of the weights.
    pub input: Cost,
    pub weights: Cost,
}

impl Add for Passes {
    type Output = Passes;

    fn add(self, other: Passes) -> Passes {
        Passes {
            forward: self.forward + other.forward,
            again: self.again + other.again,
            input: self.input + other.input,
            weights: self.weights + other.weights,
        }
    }
}

impl Mul<f64> for Passes {
    type Output = Passes;

    fn mul(self, times: f64) -> Passes {
        Passes {
            forward: self.forward * times,
            again: self.again * times,
            input: self.input * times,
            weights: self.weights * times,
        }
    }
}
