//! Online softmax state of a block of queries, and the store of its output.

use super::Forward;
use super::head_group::HeadGroup;
use super::pack;
use crate::Float;
use crate::cpu::vector::{PREFETCH_ROWS, Vector, WithSimd, prefetch};
use std::f32::consts::LN_2;
use std::ops::Range;

/// Initial maximum: below every score, and finite so that inf - inf never occurs.
const INITIAL_MAX: f32 = -1e30;

/// One number per query each.
#[derive(Clone, Copy)]
pub(super) struct SoftmaxState {
    /// Index of the last visible key, -1 if none.
    pub last_key: *mut f32,
    /// Running maximum of the scores, times log2(e).
    pub max: *mut f32,
    /// Running sum of 2^(score - max).
    pub sum: *mut f32,
    /// Factor by which earlier sums are rescaled when `max` rises.
    pub rescale: *mut f32,
}

impl SoftmaxState {
    /// # Safety
    /// The arrays can hold `width` queries.
    pub unsafe fn init(&self, group: &HeadGroup<'_>, rows: &Range<usize>, width: usize) {
        for lane in 0..width {
            // Padding sees as many keys as the last query, so that it needs no mask.
            let row = (rows.start + lane).min(rows.end - 1);
            // SAFETY: as above.
            unsafe {
                *self.last_key.add(lane) = group.visible_keys(row) as f32 - 1.0;
                *self.max.add(lane) = INITIAL_MAX;
                *self.sum.add(lane) = 0.0;
            }
        }
    }
}

/// Divides the sums of a block by the softmax denominators and stores output and log-sum-exp.
pub(super) struct StoreOutput<'a, E, O> {
    pub job: &'a Forward<'a, E, O>,
    pub group: HeadGroup<'a>,
    pub rows: Range<usize>,
    pub state: SoftmaxState,
    /// Rows of sums, `row_stride` elements apart.
    pub sums: *const f32,
    pub row_stride: usize,
}

impl<E: Float, O: Float> WithSimd for StoreOutput<'_, E, O> {
    /// # Safety
    /// No other thread writes the rows, and they are within the checked range of out and lse.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        let dim = self.group.shape.head_dim;
        for (lane, row) in self.rows.enumerate() {
            let (place, next) = (self.group.place(row), self.group.place(row + PREFETCH_ROWS));
            prefetch(self.job.out.at(next.token, next.column), dim);
            // SAFETY: as above.
            unsafe {
                let (max, sum) = (*self.state.max.add(lane), *self.state.sum.add(lane));
                let out = self.job.out.at(place.token, place.column);
                let lse = self.job.lse.at(0, place.lse);
                if self.group.visible_keys(row) == 0 {
                    std::slice::from_raw_parts_mut(out, dim).fill(O::round_from(0.0));
                    *lse = f32::NEG_INFINITY;
                    continue;
                }
                pack::store_scaled(self.sums.add(lane * self.row_stride), dim, 1.0 / sum, out);
                *lse = (max + sum.log2()) * LN_2;
            }
        }
    }
}
