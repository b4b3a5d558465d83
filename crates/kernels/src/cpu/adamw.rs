//! AdamW (Loshchilov & Hutter 2019) as PyTorch computes it: decay apart from the gradient, bias correction,
//! eps outside the root. One walk over memory: gradient, parameter and both moments once each.

use super::Cpu;
use super::partition::{GRAIN_SIZE, by_rows, parallel_for};
use super::simd::multiversion;
use crate::{AdamW, Float};
use half::bf16;

/// `AdamW` in f32, ready for the loop.
#[derive(Clone, Copy)]
struct Factors {
    keep: f32,
    pull1: f32,
    beta2: f32,
    pull2: f32,
    rate: f32,
    correct2: f32,
    eps: f32,
    scale: f32,
}

impl AdamW {
    fn factors(&self) -> Factors {
        assert!(self.step > 0, "steps count from 1");
        let correction = |beta: f64| 1.0 - beta.powf(self.step as f64);
        Factors {
            keep: (1.0 - self.lr * self.weight_decay) as f32,
            pull1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            pull2: (1.0 - self.beta2) as f32,
            rate: (self.lr / correction(self.beta1)) as f32,
            correct2: (1.0 / correction(self.beta2).sqrt()) as f32,
            eps: self.eps as f32,
            scale: self.scale as f32,
        }
    }
}

/// Steps parameters `p` with moments `m` and `v` by gradient `g`; `copy`, where given, receives the new
/// parameters in bf16.
pub fn step<G: Float>(
    cpu: &Cpu,
    numbers: &AdamW,
    p: &mut [f32],
    m: &mut [f32],
    v: &mut [f32],
    g: &[G],
    copy: Option<&mut [bf16]>,
) {
    let n = g.len();
    let lens = [p.len(), m.len(), v.len(), copy.as_ref().map_or(n, |copy| copy.len())];
    assert!(lens.iter().all(|&len| len == n), "{n} gradients, and p, m, v, copy of {lens:?}");
    let factors = numbers.factors();
    match copy {
        Some(copy) => {
            parallel_for(
                &cpu.team,
                n,
                GRAIN_SIZE,
                (by_rows(p, 1), by_rows(m, 1), by_rows(v, 1), by_rows(copy, 1)),
                |range, (p, m, v, copy)| {
                    step_and_copy(cpu.level, factors, p, m, v, &g[range], copy);
                },
            );
        }
        None => parallel_for(
            &cpu.team,
            n,
            GRAIN_SIZE,
            (by_rows(p, 1), by_rows(m, 1), by_rows(v, 1)),
            |range, (p, m, v)| {
                step_part(cpu.level, factors, p, m, v, &g[range]);
            },
        ),
    }
}

/// One element: the new (p, m, v).
#[inline(always)]
fn one<I: super::simd::Isa>(f: Factors, p: f32, m: f32, v: f32, g: f32) -> (f32, f32, f32) {
    let g = g * f.scale;
    let m = I::fma(g - m, f.pull1, m);
    let v = I::fma(g * g, f.pull2, v * f.beta2);
    let spread = I::fma(v.sqrt(), f.correct2, f.eps);
    (I::fma(-f.rate, m / spread, p * f.keep), m, v)
}

multiversion! {
    fn step_part<I, G: Float>(f: Factors, p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[G]) {
        let n = p.len();
        let (m, v, g) = (&mut m[..n], &mut v[..n], &g[..n]);
        for i in 0..n {
            (p[i], m[i], v[i]) = one::<I>(f, p[i], m[i], v[i], g[i].as_f32());
        }
    }

    fn step_and_copy<I, G: Float>(
        f: Factors, p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[G], copy: &mut [bf16],
    ) {
        let n = p.len();
        let (m, v, g, copy) = (&mut m[..n], &mut v[..n], &g[..n], &mut copy[..n]);
        for i in 0..n {
            (p[i], m[i], v[i]) = one::<I>(f, p[i], m[i], v[i], g[i].as_f32());
            copy[i] = Float::round_from(p[i]);
        }
    }
}
