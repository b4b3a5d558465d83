//! Per-query inputs of the backward pass: causal bound, log-sum-exp and D.

use super::head_group::HeadGroup;
use super::{Backward, Delta};
use crate::Float;
use crate::cpu::vector::{PREFETCH_ROWS, Vector, WithSimd, prefetch};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Loads or computes them for a block of queries.
pub(super) struct QueryStats<'a, E, G> {
    pub job: &'a Backward<'a, E, G>,
    pub group: HeadGroup<'a>,
    pub rows: Range<usize>,
    /// Number of rows with padding. Padding sees no keys, so its probabilities are zero.
    pub width: usize,
    /// Index of the last visible key, -1 if none. (width)
    pub last_key: *mut f32,
    /// Log-sum-exp times log2(e); inf for a query without visible keys. (width)
    pub lse: *mut f32,
    /// D = Σ dout · out. (width)
    pub delta: *mut f32,
}

impl<E: Float, G: Float> WithSimd for QueryStats<'_, E, G> {
    /// # Safety
    /// The rows are within the checked range, and the arrays can hold `width` elements.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        let dim = self.group.shape.head_dim;
        for lane in 0..self.width {
            let row = self.rows.start + lane;
            let (mut last_key, mut lse, mut delta) = (-1.0, f32::INFINITY, 0.0);
            if row < self.rows.end {
                let (place, next) = (self.group.place(row), self.group.place(row + PREFETCH_ROWS));
                // SAFETY: as above.
                let stored = unsafe { *self.job.lse.at(0, place.lse) };
                delta = match self.job.delta {
                    Delta::Output(out) => {
                        prefetch(out.at(next.token, next.column), dim);
                        // SAFETY: as above.
                        let [out, dout] = [out, self.job.dout].map(|rows| unsafe {
                            std::slice::from_raw_parts(rows.at(place.token, place.column), dim)
                        });
                        dot(out, dout)
                    }
                    // SAFETY: as above.
                    Delta::Known(delta) => unsafe { *delta.at(place.token, place.column / dim) },
                };
                last_key = self.group.visible_keys(row) as f32 - 1.0;
                lse = if stored == f32::NEG_INFINITY { f32::INFINITY } else { stored * LOG2_E };
            }
            // SAFETY: as above.
            unsafe {
                *self.last_key.add(lane) = last_key;
                *self.lse.add(lane) = lse;
                *self.delta.add(lane) = delta;
            }
        }
    }
}

/// Dot product with sixteen partial sums, which hide the latency of a single chain.
#[inline(always)]
pub(super) fn dot<E: Float>(a: &[E], b: &[E]) -> f32 {
    let (a, a_rest) = a.as_chunks::<16>();
    let (b, b_rest) = b.as_chunks::<16>();
    let mut sums = [0.0; 16];
    for (a, b) in a.iter().zip(b) {
        for i in 0..16 {
            sums[i] += a[i].as_f32() * b[i].as_f32();
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a.as_f32() * b.as_f32()).sum();
    sums.iter().sum::<f32>() + rest
}
