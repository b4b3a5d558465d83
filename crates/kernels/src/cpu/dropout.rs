//! Dropout whose mask is computed, not kept: an element lives or dies by the random word of its *global*
//! index, so forward, backward, recompute and every layout agree. Backward is the same function on the
//! gradient.

use super::Cpu;
use super::partition::{by_rows, grain_rows, parallel_for};
use super::random::{by_group, group};
use super::simd::multiversion;
use crate::{DropoutMask, Float, RandomKey};

impl DropoutMask {
    /// Words below it are dropped: p of all 2^32.
    fn threshold(&self) -> u32 {
        assert!((0.0..1.0).contains(&self.p), "dropout of {} is not in 0..1", self.p);
        (self.p as f64 * 2f64.powi(32)) as u32
    }

    fn scale(&self) -> f32 {
        (1.0 / (1.0 - self.p as f64)) as f32
    }
}

/// Drops and scales in place; of an activation in the forward, of its gradient in the backward.
pub fn apply<E: Float>(cpu: &Cpu, drop: &DropoutMask, x: &mut [E]) {
    let (threshold, scale) = (drop.threshold(), drop.scale());
    parallel_for(&cpu.team, x.len(), grain_rows(1), by_rows(x, 1), |range, x| {
        by_group(drop.first + range.start as u64, range.len(), |at, skip, part| {
            apply_group(cpu.level, drop.key, at, skip, threshold, scale, &mut x[part]);
        });
    });
}

multiversion! {
    fn apply_group<I, E: Float>(key: RandomKey, at: u64, skip: usize, threshold: u32, scale: f32, x: &mut [E]) {
        let words = group(key, at);
        let n = x.len();
        let words = &words[skip..][..n];
        for i in 0..n {
            let kept = if words[i] < threshold { 0.0 } else { x[i].as_f32() * scale };
            x[i] = E::round_from(kept);
        }
    }
}
