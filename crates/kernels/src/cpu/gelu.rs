//! GELU in its tanh form, as in GPT-2: `x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))`, computed as `x σ(2u)`, which is the
//! same function.

use super::Cpu;
use super::math::{clamp, sigmoid};
use super::partition::{GRAIN_SIZE, by_rows, parallel_for};
use super::simd::{Isa, multiversion};
use crate::Float;

/// 2√(2/π): scale of the sigmoid's argument.
const SCALE: f32 = 1.595_769;
const CUBE: f32 = 0.044_715;

pub fn forward<E: Float>(cpu: &Cpu, x: &[E], out: &mut [E]) {
    assert_eq!(x.len(), out.len());
    parallel_for(&cpu.team, x.len(), GRAIN_SIZE, by_rows(out, 1), |range, out| {
        forward_part(cpu.level, &x[range], out)
    });
}

/// Replaces `d` by `d gelu'(x)`; `x` is the input of the forward pass.
pub fn backward_in_place<E: Float>(cpu: &Cpu, x: &[E], d: &mut [E]) {
    assert_eq!(x.len(), d.len());
    parallel_for(&cpu.team, x.len(), GRAIN_SIZE, by_rows(d, 1), |range, d| {
        in_place_part(cpu.level, &x[range], d)
    });
}

#[inline(always)]
fn value<I: Isa>(x: f32) -> f32 {
    x * sigmoid_of::<I>(x)
}

#[inline(always)]
fn sigmoid_of<I: Isa>(x: f32) -> f32 {
    sigmoid::<I>(x * I::fma(x * x, SCALE * CUBE, SCALE))
}

/// Derivative σ + x σ (1 - σ) d(2u)/dx.
#[inline(always)]
fn slope<I: Isa>(x: f32) -> f32 {
    // Beyond ±12 the slope is 0 or 1; clamping keeps x² from overflowing.
    let near = clamp(x, -12.0, 12.0);
    let s = sigmoid_of::<I>(near);
    let inner = I::fma(near * near, 3.0 * SCALE * CUBE, SCALE);
    I::fma(near * s * (1.0 - s), inner, s)
}

multiversion! {
    fn forward_part<I, E: Float>(x: &[E], out: &mut [E]) {
        let n = out.len();
        let x = &x[..n];
        for i in 0..n {
            out[i] = E::round_from(value::<I>(x[i].as_f32()));
        }
    }

    fn in_place_part<I, E: Float>(x: &[E], d: &mut [E]) {
        let n = d.len();
        let x = &x[..n];
        for i in 0..n {
            d[i] = E::round_from(d[i].as_f32() * slope::<I>(x[i].as_f32()));
        }
    }
}
