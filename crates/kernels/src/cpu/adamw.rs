//! AdamW (Loshchilov & Hutter 2019) as in PyTorch: decoupled weight decay, bias correction, eps outside the square root.
//! One pass over memory.

use super::Cpu;
use super::partition::{GRAIN_SIZE, by_rows, parallel_for};
use super::simd::multiversion;
use crate::{AdamW, Float};
use half::bf16;

/// `AdamW` in f32, ready for the loop.
#[derive(Clone, Copy)]
pub(crate) struct Factors {
    pub decay: f32,
    pub one_minus_beta1: f32,
    pub beta2: f32,
    pub one_minus_beta2: f32,
    pub step_size: f32,
    pub correction2: f32,
    pub eps: f32,
    pub scale: f32,
}

impl AdamW {
    pub(crate) fn factors(&self) -> Factors {
        assert!(self.step > 0, "AdamW steps are numbered from 1");
        let correction = |beta: f64| 1.0 - beta.powf(self.step as f64);
        Factors {
            decay: (1.0 - self.lr * self.weight_decay) as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            step_size: (self.lr / correction(self.beta1)) as f32,
            correction2: (1.0 / correction(self.beta2).sqrt()) as f32,
            eps: self.eps as f32,
            scale: self.scale as f32,
        }
    }
}

/// Parameters and moments that a step updates, of equal length.
pub struct State<'a> {
    pub p: &'a mut [f32],
    pub m: &'a mut [f32],
    pub v: &'a mut [f32],
    /// Receives the updated parameters in bf16.
    pub bf16_copy: Option<&'a mut [bf16]>,
}

/// Takes one step with gradient `g`.
pub fn step<G: Float>(cpu: &Cpu, settings: &AdamW, state: State<'_>, g: &[G]) {
    let State { p, m, v, bf16_copy } = state;
    let n = g.len();
    let lens = [p.len(), m.len(), v.len(), bf16_copy.as_ref().map_or(n, |copy| copy.len())];
    assert!(lens.iter().all(|&len| len == n), "{n} gradients, and p, m, v, copy of {lens:?}");
    let factors = settings.factors();
    let state = (by_rows(p, 1), by_rows(m, 1), by_rows(v, 1));
    match bf16_copy {
        Some(copy) => {
            let outputs = (state, by_rows(copy, 1));
            parallel_for(&cpu.team, n, GRAIN_SIZE, outputs, |range, (state, copy)| {
                step_and_copy(cpu.level, factors, state, &g[range], copy);
            });
        }
        None => parallel_for(&cpu.team, n, GRAIN_SIZE, state, |range, state| {
            step_part(cpu.level, factors, state, &g[range]);
        }),
    }
}

/// Updated (p, m, v) of one element.
#[inline(always)]
fn one<I: super::simd::Isa>(f: Factors, p: f32, m: f32, v: f32, g: f32) -> (f32, f32, f32) {
    let g = g * f.scale;
    let m = I::fma(g - m, f.one_minus_beta1, m);
    let v = I::fma(g * g, f.one_minus_beta2, v * f.beta2);
    let denominator = I::fma(v.sqrt(), f.correction2, f.eps);
    (I::fma(-f.step_size, m / denominator, p * f.decay), m, v)
}

multiversion! {
    fn step_part<I, G: Float>(f: Factors, state: (&mut [f32], &mut [f32], &mut [f32]), g: &[G]) {
        let (p, m, v) = state;
        let n = p.len();
        let (m, v, g) = (&mut m[..n], &mut v[..n], &g[..n]);
        for i in 0..n {
            (p[i], m[i], v[i]) = one::<I>(f, p[i], m[i], v[i], g[i].as_f32());
        }
    }

    fn step_and_copy<I, G: Float>(
        f: Factors, state: (&mut [f32], &mut [f32], &mut [f32]), g: &[G], copy: &mut [bf16],
    ) {
        let (p, m, v) = state;
        let n = p.len();
        let (m, v, g, copy) = (&mut m[..n], &mut v[..n], &g[..n], &mut copy[..n]);
        for i in 0..n {
            (p[i], m[i], v[i]) = one::<I>(f, p[i], m[i], v[i], g[i].as_f32());
            copy[i] = Float::round_from(p[i]);
        }
    }
}
