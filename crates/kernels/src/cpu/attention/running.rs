//! What a forward pass keeps of a block of queries while they meet their keys, and what it leaves at the end.

use super::Forward;
use super::pack;
use super::unit::Unit;
use crate::Float;
use crate::cpu::vector::{AHEAD, Job, Vector, soon};
use std::f32::consts::LN_2;
use std::ops::Range;

/// Below every score, and finite, so that a query without a key yet never meets inf - inf.
const NO_MAX: f32 = -1e30;

/// One number per query each.
#[derive(Clone, Copy)]
pub(super) struct Running {
    /// The number of the last key seen, -1 if none.
    pub last: *mut f32,
    /// The largest score so far, times log2(e).
    pub top: *mut f32,
    /// The sum of 2^(score - top) so far.
    pub sum: *mut f32,
    /// What sums over values must be multiplied with when `top` has risen.
    pub shrink: *mut f32,
}

impl Running {
    /// # Safety
    /// There is room for `wide` queries.
    pub unsafe fn begin(&self, unit: &Unit<'_>, rows: &Range<usize>, wide: usize) {
        for lane in 0..wide {
            // What pads a block sees as much as its last query, so that it asks for no mask.
            let row = (rows.start + lane).min(rows.end - 1);
            // SAFETY: as above.
            unsafe {
                *self.last.add(lane) = unit.seen(row) as f32 - 1.0;
                *self.top.add(lane) = NO_MAX;
                *self.sum.add(lane) = 0.0;
            }
        }
    }
}

/// Divides a block's sums by their weights.
pub(super) struct Finish<'a, E, O> {
    pub job: &'a Forward<'a, E, O>,
    pub unit: Unit<'a>,
    pub rows: Range<usize>,
    pub running: Running,
    /// Rows of sums, `step` apart.
    pub sums: *const f32,
    pub step: usize,
}

impl<E: Float, O: Float> Job for Finish<'_, E, O> {
    /// # Safety
    /// The rows were dealt to this member, and out and lse checked for them.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        let dim = self.unit.shape.head_dim;
        for (lane, row) in self.rows.enumerate() {
            let (place, next) = (self.unit.place(row), self.unit.place(row + AHEAD));
            soon(self.job.out.at(next.token, next.column), dim);
            // SAFETY: as above.
            unsafe {
                let (top, sum) = (*self.running.top.add(lane), *self.running.sum.add(lane));
                let out = self.job.out.at(place.token, place.column);
                let lse = self.job.lse.at(0, place.lse);
                if self.unit.seen(row) == 0 {
                    std::slice::from_raw_parts_mut(out, dim).fill(O::round_from(0.0));
                    *lse = f32::NEG_INFINITY;
                    continue;
                }
                pack::narrow(self.sums.add(lane * self.step), dim, 1.0 / sum, out);
                *lse = (top + sum.log2()) * LN_2;
            }
        }
    }
}
