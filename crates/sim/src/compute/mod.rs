//! Compute time on one rank: matmuls, attention and memory-bound operations. Knows nothing about communication.

mod attention;
mod class;
mod ends;
mod layer;
mod matmul;

pub(crate) use attention::attention;
pub use class::{ByClass, OpClass, same_in_all_families};
pub(crate) use ends::{embed, head, optimizer};
pub(crate) use layer::layer;
pub use matmul::{MatmulCall, grouped, matmul};

use std::ops::{Add, Mul};

/// Cost of some kernels.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Cost {
    /// Device time.
    pub seconds: f64,
    /// FLOPs of matmuls and attention as executed.
    pub flops: f64,
    /// Kernel launches.
    pub kernels: f64,
    /// Device time by operation class.
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

/// Costs of a block per micro-batch.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Passes {
    pub forward: Cost,
    /// Recomputation before the backward pass.
    pub again: Cost,
    /// Input gradient and weight gradient.
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
