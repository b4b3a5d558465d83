//! Dropout with a mask that is computed instead of stored: it depends on the random word of the *global* index of an
//! element, so forward pass, backward pass, recomputation and all layouts agree. The backward pass is the same function,
//! applied to the gradient.

use super::Cpu;
use super::partition::{by_rows, grain_rows, parallel_for};
use super::random::{by_group, group};
use super::simd::multiversion;
use crate::{DropoutMask, Float, RandomKey};

impl DropoutMask {
    /// Elements with a random word below this are dropped: p of all 2^32.
    pub(crate) fn threshold(&self) -> u32 {
        assert!((0.0..1.0).contains(&self.p), "dropout probability {} is not in 0..1", self.p);
        (self.p as f64 * 2f64.powi(32)) as u32
    }

    pub(crate) fn scale(&self) -> f32 {
        (1.0 / (1.0 - self.p as f64)) as f32
    }
}

/// Drops and scales in place: activations in the forward pass, gradients in the backward pass.
pub fn apply<E: Float>(cpu: &Cpu, drop: &DropoutMask, x: &mut [E]) {
    let (threshold, scale) = (drop.threshold(), drop.scale());
    parallel_for(&cpu.team, x.len(), grain_rows(1), by_rows(x, 1), |range, x| {
        by_group(drop.first + range.start as u64, range.len(), |at, skip, part| {
            apply_words(cpu.level, drop.key, (at, skip), (threshold, scale), &mut x[part]);
        });
    });
}

multiversion! {
    /// `at` is a group of random words and the first word to use; `rule` the threshold and the scale.
    fn apply_words<I, E: Float>(key: RandomKey, at: (u64, usize), rule: (u32, f32), x: &mut [E]) {
        let (threshold, scale) = rule;
        let words = group(key, at.0);
        let n = x.len();
        let words = &words[at.1..][..n];
        for i in 0..n {
            let kept = if words[i] < threshold { 0.0 } else { x[i].as_f32() * scale };
            x[i] = E::round_from(kept);
        }
    }
}
