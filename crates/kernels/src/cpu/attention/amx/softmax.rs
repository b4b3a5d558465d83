//! Between the products of a strip: scores in f32 come in, probabilities in bf16 go out, in the order in which
//! the matrix unit takes them.

#![allow(clippy::needless_range_loop)] // rows and columns of registers read best by number

use crate::cpu::attention::running::Running;
use crate::cpu::attention::softmax::Mask;
use crate::cpu::vector::{Job, Vector};
use std::ops::Range;

/// One step of the online softmax.
pub(super) struct Online {
    /// Even.
    pub keys: usize,
    /// Which of the queries; a multiple of 32.
    pub lanes: Range<usize>,
    /// How many there are in all.
    pub wide: usize,
    /// Scores, overwritten. (keys, wide)
    pub scores: *mut f32,
    /// What makes them powers of two.
    pub factor: f32,
    pub mask: Mask,
    pub running: Running,
    /// Out: 2^(score - top), in pairs of keys. (keys / 2, wide)
    pub shares: *mut u32,
}

impl Job for Online {
    /// # Safety
    /// The pointers reach as many elements as the shapes say.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        for lane in self.lanes.clone().step_by(V::LANES) {
            // SAFETY: as above.
            unsafe {
                let at = |key: usize| self.scores.add(key * self.wide + lane);
                let before = V::load(self.running.top.add(lane));
                let mut tops = [before; 2];
                let mut factor = V::splat(self.factor);
                if self.mask.cuts {
                    let last = V::load(self.mask.last.add(lane));
                    for key in 0..self.keys {
                        let number = (self.mask.first_key + key) as f32;
                        let hidden = V::splat(f32::NEG_INFINITY);
                        let score =
                            last.where_at_least(number, V::load(at(key)).mul(factor), hidden);
                        score.store(at(key));
                        tops[0] = score.max(tops[0]);
                    }
                    factor = V::splat(1.0);
                } else {
                    for key in (0..self.keys).step_by(2) {
                        tops[0] = V::load(at(key)).mul(factor).max(tops[0]);
                        tops[1] = V::load(at(key + 1)).mul(factor).max(tops[1]);
                    }
                }
                let top = tops[0].max(tops[1]);
                let shrink = before.sub(top).exp2();
                let down = V::splat(0.0).sub(top);
                let mut sums = [V::splat(0.0); 2];
                for key in (0..self.keys).step_by(2) {
                    let low = V::load(at(key)).mul_add(factor, down).exp2();
                    let high = V::load(at(key + 1)).mul_add(factor, down).exp2();
                    sums = [sums[0].add(low), sums[1].add(high)];
                    V::pair(low, high).store(self.shares.add(key / 2 * self.wide + lane).cast());
                }
                let sum = V::load(self.running.sum.add(lane)).mul_add(shrink, sums[0].add(sums[1]));
                sum.store(self.running.sum.add(lane));
                top.store(self.running.top.add(lane));
                shrink.store(self.running.shrink.add(lane));
            }
        }
    }
}

/// Multiplies sums with what `top` has risen by. (dim, wide), some lanes
pub(super) struct Shrink {
    pub dim: usize,
    pub lanes: Range<usize>,
    pub wide: usize,
    pub sums: *mut f32,
    pub by: *const f32,
}

impl Job for Shrink {
    /// # Safety
    /// The pointers reach as many elements as the shapes say.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        for lane in self.lanes.clone().step_by(V::LANES) {
            // SAFETY: as above.
            unsafe {
                let by = V::load(self.by.add(lane));
                for i in 0..self.dim {
                    let at = self.sums.add(i * self.wide + lane);
                    V::load(at).mul(by).store(at);
                }
            }
        }
    }
}

/// The probabilities again, from the log-sum-exp, and the gradient of the scores.
pub(super) struct Gradient {
    /// Even.
    pub keys: usize,
    /// Which of the queries; a multiple of 32.
    pub lanes: Range<usize>,
    /// How many there are in all.
    pub wide: usize,
    /// Scores. (keys, wide)
    pub scores: *const f32,
    /// What makes them powers of two.
    pub factor: f32,
    /// Gradients of the probabilities. (keys, wide)
    pub slopes: *const f32,
    pub mask: Mask,
    /// Log-sum-exp times log2(e); inf for a query that saw nothing. (wide)
    pub lse: *const f32,
    /// D = sum of dout out. (wide)
    pub delta: *const f32,
    /// Out: probabilities P. (keys, wide)
    pub shares: *mut u16,
    /// Out: gradients of the scores, P (dP - D). (keys, wide)
    pub dscores: *mut u16,
    /// Out: the same in pairs of keys. (keys / 2, wide)
    pub paired: *mut u32,
}

impl Job for Gradient {
    /// # Safety
    /// The pointers reach as many elements as the shapes say.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        for lane in self.lanes.clone().step_by(2 * V::LANES) {
            // SAFETY: as above.
            unsafe {
                let pair = |from: *const f32| {
                    [V::load(from.add(lane)), V::load(from.add(lane + V::LANES))]
                };
                let (last, lse, delta) = (pair(self.mask.last), pair(self.lse), pair(self.delta));
                let factor = V::splat(self.factor);
                for key in (0..self.keys).step_by(2) {
                    let mut dscores = [[V::splat(0.0); 2]; 2];
                    for down in 0..2 {
                        let row = (key + down) * self.wide + lane;
                        let number = (self.mask.first_key + key + down) as f32;
                        let mut shares = [V::splat(0.0); 2];
                        for across in 0..2 {
                            let at = row + across * V::LANES;
                            let score = V::load(self.scores.add(at)).mul(factor);
                            let mut share = score.sub(lse[across]).exp2();
                            if self.mask.cuts {
                                share = last[across].where_at_least(number, share, V::splat(0.0));
                            }
                            let slope = V::load(self.slopes.add(at)).sub(delta[across]);
                            shares[across] = share;
                            dscores[down][across] = slope.mul(share);
                        }
                        V::store_halves(shares[0], shares[1], self.shares.add(row));
                        V::store_halves(dscores[down][0], dscores[down][1], self.dscores.add(row));
                    }
                    for across in 0..2 {
                        let to = self.paired.add(key / 2 * self.wide + lane + across * V::LANES);
                        V::pair(dscores[0][across], dscores[1][across]).store(to.cast());
                    }
                }
            }
        }
    }
}
