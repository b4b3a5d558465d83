//! Dropout whose mask is computed, not kept: an element lives or dies by the random word of its *global*
//! index, so forward, backward, recompute and every layout agree. Backward is the same function on the
//! gradient.

use super::Cpu;
use super::cut::{cut, split, worth};
use super::random::{Key, by_group, group};
use super::simd::leveled;
use crate::Float;

/// Where a slice lies in the whole tensor, and what is to be dropped of it.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    pub key: Key,
    /// The share that is dropped, 0 ≤ p < 1; the rest is scaled by 1 / (1 - p).
    pub p: f32,
    /// The global index of the slice's first element.
    pub first: u64,
    /// Elements that lie side by side in the whole; the next `width` begin `stride` further on.
    pub width: usize,
    pub stride: u64,
}

impl Dropout {
    /// A slice of `len` that is also one run in the whole tensor.
    pub fn run(key: Key, p: f32, first: u64, len: usize) -> Dropout {
        Dropout { key, p, first, width: len.max(1), stride: 0 }
    }

    /// Words below it are dropped: p of all 2^32.
    fn threshold(&self) -> u32 {
        assert!((0.0..1.0).contains(&self.p), "dropout of {} is not in 0..1", self.p);
        (self.p as f64 * 2f64.powi(32)) as u32
    }

    fn scale(&self) -> f32 {
        (1.0 / (1.0 - self.p as f64)) as f32
    }

    /// Calls `work` with (group, where in the group, range of the slice) for every run of `elements`.
    fn groups(
        &self,
        elements: std::ops::Range<usize>,
        mut work: impl FnMut(u64, usize, std::ops::Range<usize>),
    ) {
        assert!(self.width > 0, "rows of no elements");
        let mut at = elements.start;
        while at < elements.end {
            let end = (at / self.width + 1) * self.width;
            let end = end.min(elements.end);
            let index =
                self.first + (at / self.width) as u64 * self.stride + (at % self.width) as u64;
            by_group(index, end - at, |group, skip, part| {
                work(group, skip, at + part.start..at + part.end)
            });
            at = end;
        }
    }
}

/// Drops and scales in place; of an activation in the forward, of its gradient in the backward.
pub fn apply<E: Float>(cpu: &Cpu, drop: &Dropout, x: &mut [E]) {
    let (threshold, scale) = (drop.threshold(), drop.scale());
    split(&cpu.team, x.len(), worth(1), cut(x, 1), |range, x| {
        drop.groups(range.clone(), |at, skip, part| {
            let x = &mut x[part.start - range.start..part.end - range.start];
            apply_group(cpu.level, drop.key, at, skip, threshold, scale, x);
        });
    });
}

/// `a += dropout(b)`: into the residual stream.
pub fn add<E: Float>(cpu: &Cpu, drop: &Dropout, a: &mut [E], b: &[E]) {
    assert_eq!(a.len(), b.len());
    let (threshold, scale) = (drop.threshold(), drop.scale());
    split(&cpu.team, b.len(), worth(1), cut(a, 1), |range, a| {
        drop.groups(range.clone(), |at, skip, part| {
            let a = &mut a[part.start - range.start..part.end - range.start];
            add_group(cpu.level, drop.key, at, skip, threshold, scale, a, &b[part]);
        });
    });
}

leveled! {
    fn apply_group<I, E: Float>(key: Key, at: u64, skip: usize, threshold: u32, scale: f32, x: &mut [E]) {
        let words = group(key, at);
        let n = x.len();
        let words = &words[skip..][..n];
        for i in 0..n {
            let kept = if words[i] < threshold { 0.0 } else { x[i].as_f32() * scale };
            x[i] = E::round_from(kept);
        }
    }

    fn add_group<I, E: Float>(
        key: Key, at: u64, skip: usize, threshold: u32, scale: f32, a: &mut [E], b: &[E],
    ) {
        let words = group(key, at);
        let n = a.len();
        let (words, b) = (&words[skip..][..n], &b[..n]);
        for i in 0..n {
            let kept = if words[i] < threshold { 0.0 } else { b[i].as_f32() * scale };
            a[i] = E::round_from(a[i].as_f32() + kept);
        }
    }
}
