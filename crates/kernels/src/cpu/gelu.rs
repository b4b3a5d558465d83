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

/// `dx = dy gelu'(x)`; `x` is the input of the forward pass.
pub fn backward<E: Float>(cpu: &Cpu, x: &[E], dy: &[E], dx: &mut [E]) {
    assert!(x.len() == dy.len() && x.len() == dx.len(), "{} {} {}", x.len(), dy.len(), dx.len());
    parallel_for(&cpu.team, x.len(), GRAIN_SIZE, by_rows(dx, 1), |range, dx| {
        backward_part(cpu.level, &x[range.clone()], &dy[range], dx);
    });
}

/// `backward`, with `dx` overwriting `dy`.
pub fn backward_in_place<E: Float>(cpu: &Cpu, x: &[E], d: &mut [E]) {
    assert_eq!(x.len(), d.len());
    parallel_for(&cpu.team, x.len(), GRAIN_SIZE, by_rows(d, 1), |range, d| {
        in_place_part(cpu.level, &x[range], d)
    });
}

/// `backward_in_place` that also recomputes `out = gelu(x)`: the weight gradient of the next layer needs it if the output
/// was not saved.
pub fn backward_recompute<E: Float>(cpu: &Cpu, x: &[E], d: &mut [E], out: &mut [E]) {
    assert!(x.len() == d.len() && x.len() == out.len(), "{} {} {}", x.len(), d.len(), out.len());
    parallel_for(
        &cpu.team,
        x.len(),
        GRAIN_SIZE,
        (by_rows(d, 1), by_rows(out, 1)),
        |range, (d, out)| {
            recompute_part(cpu.level, &x[range], d, out);
        },
    );
}

#[inline(always)]
fn value<I: Isa>(x: f32) -> f32 {
    x * sigmoid_of::<I>(x)
}

#[inline(always)]
fn sigmoid_of<I: Isa>(x: f32) -> f32 {
    sigmoid::<I>(x * I::fma(x * x, SCALE * CUBE, SCALE))
}

/// GELU and its derivative σ + x σ (1 - σ) d(2u)/dx.
#[inline(always)]
fn value_and_slope<I: Isa>(x: f32) -> (f32, f32) {
    // Beyond ±12 the slope is 0 or 1; clamping keeps x² from overflowing.
    let near = clamp(x, -12.0, 12.0);
    let s = sigmoid_of::<I>(near);
    let inner = I::fma(near * near, 3.0 * SCALE * CUBE, SCALE);
    (x * s, I::fma(near * s * (1.0 - s), inner, s))
}

multiversion! {
    fn forward_part<I, E: Float>(x: &[E], out: &mut [E]) {
        let n = out.len();
        let x = &x[..n];
        for i in 0..n {
            out[i] = E::round_from(value::<I>(x[i].as_f32()));
        }
    }

    fn backward_part<I, E: Float>(x: &[E], dy: &[E], dx: &mut [E]) {
        let n = dx.len();
        let (x, dy) = (&x[..n], &dy[..n]);
        for i in 0..n {
            dx[i] = E::round_from(dy[i].as_f32() * value_and_slope::<I>(x[i].as_f32()).1);
        }
    }

    fn in_place_part<I, E: Float>(x: &[E], d: &mut [E]) {
        let n = d.len();
        let x = &x[..n];
        for i in 0..n {
            d[i] = E::round_from(d[i].as_f32() * value_and_slope::<I>(x[i].as_f32()).1);
        }
    }

    fn recompute_part<I, E: Float>(x: &[E], d: &mut [E], out: &mut [E]) {
        let n = d.len();
        let (x, out) = (&x[..n], &mut out[..n]);
        for i in 0..n {
            let (value, slope) = value_and_slope::<I>(x[i].as_f32());
            d[i] = E::round_from(d[i].as_f32() * slope);
            out[i] = E::round_from(value);
        }
    }
}
