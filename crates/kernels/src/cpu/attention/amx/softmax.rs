//! Softmax of a sub-tile, forward and backward: scores in f32, probabilities in bf16 in the layout that the matrix
//! unit needs.

#![allow(clippy::needless_range_loop)] // loops over arrays of registers are clearer with indices

use crate::cpu::attention::softmax::Mask;
use crate::cpu::attention::softmax_state::SoftmaxState;
use crate::cpu::vector::{Vector, WithSimd};
use std::ops::Range;

/// One step of the online softmax.
pub(super) struct OnlineSoftmax {
    /// Even.
    pub keys: usize,
    /// Range of queries; its length is a multiple of 32.
    pub lanes: Range<usize>,
    /// Number of queries in a row of the tile.
    pub width: usize,
    /// Scores, overwritten. (keys, width)
    pub scores: *mut f32,
    /// Factor of the scores: the softmax scale times log2(e).
    pub factor: f32,
    pub mask: Mask,
    pub state: SoftmaxState,
    /// Out: 2^(score - max), in pairs of keys. (keys / 2, width)
    pub probs: *mut u32,
}

impl WithSimd for OnlineSoftmax {
    /// # Safety
    /// The pointers are valid for the shapes given at the fields.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        for lane in self.lanes.clone().step_by(V::LANES) {
            // SAFETY: as above.
            unsafe {
                let at = |key: usize| self.scores.add(key * self.width + lane);
                let before = V::load(self.state.max.add(lane));
                let mut maxima = [before; 2];
                let mut factor = V::splat(self.factor);
                if self.mask.masked {
                    let last = V::load(self.mask.last_key.add(lane));
                    for key in 0..self.keys {
                        let index = (self.mask.first_key + key) as f32;
                        let hidden = V::splat(f32::NEG_INFINITY);
                        let score = last.select_ge(index, V::load(at(key)).mul(factor), hidden);
                        score.store(at(key));
                        maxima[0] = score.max(maxima[0]);
                    }
                    factor = V::splat(1.0);
                } else {
                    for key in (0..self.keys).step_by(2) {
                        maxima[0] = V::load(at(key)).mul(factor).max(maxima[0]);
                        maxima[1] = V::load(at(key + 1)).mul(factor).max(maxima[1]);
                    }
                }
                let max = maxima[0].max(maxima[1]);
                let rescale = before.sub(max).exp2();
                let negative_max = V::splat(0.0).sub(max);
                let mut sums = [V::splat(0.0); 2];
                for key in (0..self.keys).step_by(2) {
                    let low = V::load(at(key)).mul_add(factor, negative_max).exp2();
                    let high = V::load(at(key + 1)).mul_add(factor, negative_max).exp2();
                    sums = [sums[0].add(low), sums[1].add(high)];
                    V::bf16_pair(low, high)
                        .store(self.probs.add(key / 2 * self.width + lane).cast());
                }
                let sum = V::load(self.state.sum.add(lane)).mul_add(rescale, sums[0].add(sums[1]));
                sum.store(self.state.sum.add(lane));
                max.store(self.state.max.add(lane));
                rescale.store(self.state.rescale.add(lane));
            }
        }
    }
}

/// Rescales sums (dim, width) after the maximum has risen.
pub(super) struct Rescale {
    pub dim: usize,
    pub lanes: Range<usize>,
    pub width: usize,
    pub sums: *mut f32,
    pub by: *const f32,
}

impl WithSimd for Rescale {
    /// # Safety
    /// The pointers are valid for the shapes given at the fields.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        for lane in self.lanes.clone().step_by(V::LANES) {
            // SAFETY: as above.
            unsafe {
                let by = V::load(self.by.add(lane));
                for i in 0..self.dim {
                    let at = self.sums.add(i * self.width + lane);
                    V::load(at).mul(by).store(at);
                }
            }
        }
    }
}

/// Recomputes the probabilities from the log-sum-exp, and computes the gradient of the scores.
pub(super) struct SoftmaxBackward {
    /// Even.
    pub keys: usize,
    /// Range of queries; its length is a multiple of 32.
    pub lanes: Range<usize>,
    /// Number of queries in a row of the tile.
    pub width: usize,
    /// Scores. (keys, width)
    pub scores: *const f32,
    /// Factor of the scores: the softmax scale times log2(e).
    pub factor: f32,
    /// Gradients of the probabilities. (keys, width)
    pub dprobs: *const f32,
    pub mask: Mask,
    /// Log-sum-exp times log2(e); inf for a query without visible keys. (width)
    pub lse: *const f32,
    /// D = Σ dout · out. (width)
    pub delta: *const f32,
    /// Out: probabilities P. (keys, width)
    pub probs: *mut u16,
    /// Out: gradients of the scores, P (dP - D). (keys, width)
    pub dscores: *mut u16,
    /// Out: the same in pairs of keys. (keys / 2, width)
    pub dscore_pairs: *mut u32,
}

impl WithSimd for SoftmaxBackward {
    /// # Safety
    /// The pointers are valid for the shapes given at the fields.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        for lane in self.lanes.clone().step_by(2 * V::LANES) {
            // SAFETY: as above.
            unsafe {
                let pair = |from: *const f32| {
                    [V::load(from.add(lane)), V::load(from.add(lane + V::LANES))]
                };
                let (last, lse, delta) =
                    (pair(self.mask.last_key), pair(self.lse), pair(self.delta));
                let factor = V::splat(self.factor);
                for key in (0..self.keys).step_by(2) {
                    let mut dscores = [[V::splat(0.0); 2]; 2];
                    for row in 0..2 {
                        let start = (key + row) * self.width + lane;
                        let index = (self.mask.first_key + key + row) as f32;
                        let mut probs = [V::splat(0.0); 2];
                        for across in 0..2 {
                            let at = start + across * V::LANES;
                            let score = V::load(self.scores.add(at)).mul(factor);
                            let mut prob = score.sub(lse[across]).exp2();
                            if self.mask.masked {
                                prob = last[across].select_ge(index, prob, V::splat(0.0));
                            }
                            let dscore = V::load(self.dprobs.add(at)).sub(delta[across]);
                            probs[across] = prob;
                            dscores[row][across] = dscore.mul(prob);
                        }
                        V::store_bf16(probs[0], probs[1], self.probs.add(start));
                        V::store_bf16(dscores[row][0], dscores[row][1], self.dscores.add(start));
                    }
                    for across in 0..2 {
                        let to =
                            self.dscore_pairs.add(key / 2 * self.width + lane + across * V::LANES);
                        V::bf16_pair(dscores[0][across], dscores[1][across]).store(to.cast());
                    }
                }
            }
        }
    }
}
