//! Between the products of a tile: scores become probabilities. Tiles lie keys down and queries across, so
//! that every query is a lane and nothing is ever summed across lanes.

use super::running::Running;
use crate::cpu::vector::{Job, Vector};
use std::ops::Range;

/// The causal bound of one tile.
#[derive(Clone, Copy)]
pub(super) struct Mask {
    /// The number of the last key that each query sees, -1 if none. (wide)
    pub last: *const f32,
    /// The number of the tile's first key.
    pub first_key: usize,
    /// Whether any query of the tile misses any of its keys.
    pub cuts: bool,
}

/// One step of the online softmax (Milakov & Gimelshein 2018), in powers of two.
pub(super) struct Online {
    pub keys: usize,
    /// Which of the queries, in whole vectors.
    pub lanes: Range<usize>,
    /// How many there are in all.
    pub wide: usize,
    /// In: scores times log2(e). Out: 2^(score - top). (keys, wide)
    pub scores: *mut f32,
    pub mask: Mask,
    pub running: Running,
}

impl Job for Online {
    /// # Safety
    /// The pointers reach as many elements as the shapes say.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        for lane in self.lanes.clone().step_by(V::LANES) {
            // SAFETY: `lane` and the vector's width stay below `wide`.
            unsafe {
                let scores = self.scores.add(lane);
                // Two at a time: one chain of maxima would wait for itself.
                let before = V::load(self.running.top.add(lane));
                let mut tops = [before; 2];
                if self.mask.cuts {
                    let last = V::load(self.mask.last.add(lane));
                    for key in 0..self.keys {
                        let at = scores.add(key * self.wide);
                        let number = (self.mask.first_key + key) as f32;
                        let hidden = V::splat(f32::NEG_INFINITY);
                        let score = last.where_at_least(number, V::load(at), hidden);
                        score.store(at);
                        tops[0] = score.max(tops[0]);
                    }
                } else {
                    for key in (1..self.keys).step_by(2) {
                        tops[0] = V::load(scores.add((key - 1) * self.wide)).max(tops[0]);
                        tops[1] = V::load(scores.add(key * self.wide)).max(tops[1]);
                    }
                    let last = scores.add((self.keys - 1) * self.wide);
                    tops[0] = V::load(last).max(tops[0]);
                }
                let top = tops[0].max(tops[1]);
                let shrink = before.sub(top).exp2();
                let mut sum = V::splat(0.0);
                for key in 0..self.keys {
                    let at = scores.add(key * self.wide);
                    let share = V::load(at).sub(top).exp2();
                    sum = sum.add(share);
                    share.store(at);
                }
                V::load(self.running.sum.add(lane))
                    .mul_add(shrink, sum)
                    .store(self.running.sum.add(lane));
                top.store(self.running.top.add(lane));
                shrink.store(self.running.shrink.add(lane));
            }
        }
    }
}

/// The probabilities again, from the log-sum-exp, and the gradient of the scores.
pub(super) struct Gradient {
    pub keys: usize,
    /// Which of the queries, in whole vectors.
    pub lanes: Range<usize>,
    /// How many there are in all.
    pub wide: usize,
    /// In: scores times log2(e). Out: probabilities P. (keys, wide)
    pub scores: *mut f32,
    /// In: gradients of P. Out: gradients of the scores, P (dP - D). (keys, wide)
    pub slopes: *mut f32,
    pub mask: Mask,
    /// Log-sum-exp times log2(e); inf for a query that saw nothing. (wide)
    pub lse: *const f32,
    /// D = sum of dout out. (wide)
    pub delta: *const f32,
}

impl Job for Gradient {
    /// # Safety
    /// The pointers reach as many elements as the shapes say.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        for lane in self.lanes.clone().step_by(V::LANES) {
            // SAFETY: `lane` and the vector's width stay below `wide`.
            unsafe {
                let last = V::load(self.mask.last.add(lane));
                let lse = V::load(self.lse.add(lane));
                let delta = V::load(self.delta.add(lane));
                for key in 0..self.keys {
                    let at = key * self.wide + lane;
                    let mut share = V::load(self.scores.add(at)).sub(lse).exp2();
                    if self.mask.cuts {
                        let number = (self.mask.first_key + key) as f32;
                        share = last.where_at_least(number, share, V::splat(0.0));
                    }
                    share.store(self.scores.add(at));
                    let slope = V::load(self.slopes.add(at)).sub(delta).mul(share);
                    slope.store(self.slopes.add(at));
                }
            }
        }
    }
}
