//! Softmax of a tile of scores, forward and backward. Rows of a tile are keys and columns are queries, so that every
//! query is a lane and nothing is summed across lanes.

use super::softmax_state::SoftmaxState;
use crate::cpu::vector::{Vector, WithSimd};
use std::ops::Range;

/// Causal mask of one tile.
#[derive(Clone, Copy)]
pub(super) struct Mask {
    /// Index of the last visible key of each query, -1 if none. (width)
    pub last_key: *const f32,
    /// Index of the tile's first key.
    pub first_key: usize,
    /// Whether any key of the tile is hidden from any of its queries.
    pub masked: bool,
}

/// One step of the online softmax (Milakov & Gimelshein 2018), in powers of two.
pub(super) struct OnlineSoftmax {
    pub keys: usize,
    /// Range of queries, in whole vectors.
    pub lanes: Range<usize>,
    /// Number of queries in a row of the tile.
    pub width: usize,
    /// In: scores times log2(e). Out: 2^(score - max). (keys, width)
    pub scores: *mut f32,
    pub mask: Mask,
    pub state: SoftmaxState,
}

impl WithSimd for OnlineSoftmax {
    /// # Safety
    /// The pointers are valid for the shapes given at the fields.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        for lane in self.lanes.clone().step_by(V::LANES) {
            // SAFETY: `lane` and the vector's width stay below `width`.
            unsafe {
                let scores = self.scores.add(lane);
                // Two maxima at a time hide the latency of a single chain.
                let before = V::load(self.state.max.add(lane));
                let mut maxima = [before; 2];
                if self.mask.masked {
                    let last = V::load(self.mask.last_key.add(lane));
                    for key in 0..self.keys {
                        let at = scores.add(key * self.width);
                        let index = (self.mask.first_key + key) as f32;
                        let hidden = V::splat(f32::NEG_INFINITY);
                        let score = last.select_ge(index, V::load(at), hidden);
                        score.store(at);
                        maxima[0] = score.max(maxima[0]);
                    }
                } else {
                    for key in (1..self.keys).step_by(2) {
                        maxima[0] = V::load(scores.add((key - 1) * self.width)).max(maxima[0]);
                        maxima[1] = V::load(scores.add(key * self.width)).max(maxima[1]);
                    }
                    let last = scores.add((self.keys - 1) * self.width);
                    maxima[0] = V::load(last).max(maxima[0]);
                }
                let max = maxima[0].max(maxima[1]);
                let rescale = before.sub(max).exp2();
                let mut sum = V::splat(0.0);
                for key in 0..self.keys {
                    let at = scores.add(key * self.width);
                    let prob = V::load(at).sub(max).exp2();
                    sum = sum.add(prob);
                    prob.store(at);
                }
                V::load(self.state.sum.add(lane))
                    .mul_add(rescale, sum)
                    .store(self.state.sum.add(lane));
                max.store(self.state.max.add(lane));
                rescale.store(self.state.rescale.add(lane));
            }
        }
    }
}

/// Recomputes the probabilities from the log-sum-exp, and computes the gradient of the scores.
pub(super) struct SoftmaxBackward {
    pub keys: usize,
    /// Range of queries, in whole vectors.
    pub lanes: Range<usize>,
    /// Number of queries in a row of the tile.
    pub width: usize,
    /// In: scores times log2(e). Out: probabilities P. (keys, width)
    pub scores: *mut f32,
    /// In: gradients of P. Out: gradients of the scores, P (dP - D). (keys, width)
    pub dprobs: *mut f32,
    pub mask: Mask,
    /// Log-sum-exp times log2(e); inf for a query without visible keys. (width)
    pub lse: *const f32,
    /// D = Σ dout · out. (width)
    pub delta: *const f32,
}

impl WithSimd for SoftmaxBackward {
    /// # Safety
    /// The pointers are valid for the shapes given at the fields.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        for lane in self.lanes.clone().step_by(V::LANES) {
            // SAFETY: `lane` and the vector's width stay below `width`.
            unsafe {
                let last = V::load(self.mask.last_key.add(lane));
                let lse = V::load(self.lse.add(lane));
                let delta = V::load(self.delta.add(lane));
                for key in 0..self.keys {
                    let at = key * self.width + lane;
                    let mut prob = V::load(self.scores.add(at)).sub(lse).exp2();
                    if self.mask.masked {
                        let index = (self.mask.first_key + key) as f32;
                        prob = last.select_ge(index, prob, V::splat(0.0));
                    }
                    prob.store(self.scores.add(at));
                    let dscore = V::load(self.dprobs.add(at)).sub(delta).mul(prob);
                    dscore.store(self.dprobs.add(at));
                }
            }
        }
    }
}
