//! Random numbers by position. A number depends on the seed, the stream and the global index of its element, so
//! every layout and every thread count produces the same numbers.

use super::{Backend, Device, OpClass, with_float};
use crate::ViewMut;
use crate::cpu::{dropout, random};
use crate::cuda;

/// Selects a sequence of random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RandomKey {
    /// The run's seed.
    pub seed: u64,
    /// Distinguishes uses: a parameter, or one dropout in one step.
    pub stream: u64,
}

/// The dropout mask of elements that are contiguous in the whole tensor. It is computed from global indices and never
/// stored, so forward, backward and recomputation use the same mask.
#[derive(Clone, Copy, Debug)]
pub struct DropoutMask {
    pub key: RandomKey,
    /// Probability of zeroing an element, 0 ≤ p < 1. The others are scaled by 1 / (1 - p).
    pub p: f32,
    /// Global index of the first element.
    pub first: u64,
}

impl Device {
    /// Normal random numbers. Element i depends on `key` and `first + i`.
    pub fn normal(&self, out: ViewMut<'_>, key: RandomKey, first: u64, std: f32) {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(out.dtype(), E => {
                random::normal::<E>(cpu, key, first, out.host(), std)
            }),
            Backend::Cuda(gpu) => cuda::random::normal(gpu, out, key, first, std),
        })
    }

    /// Applies a dropout mask to activations, or to their gradients in the backward pass.
    pub fn dropout(&self, x: ViewMut<'_>, mask: &DropoutMask) {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(cpu) => {
                with_float!(x.dtype(), E => dropout::apply::<E>(cpu, mask, x.host()))
            }
            Backend::Cuda(gpu) => cuda::random::dropout(gpu, x, mask),
        })
    }
}
