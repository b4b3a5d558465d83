//! What a backward pass knows of a block of queries before it meets any key.

use super::unit::Unit;
use super::{Backward, Delta};
use crate::Float;
use crate::cpu::vector::{AHEAD, Job, Vector, soon};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Fills in what each query sees, its log-sum-exp, and D.
pub(super) struct Known<'a, E, G> {
    pub job: &'a Backward<'a, E, G>,
    pub unit: Unit<'a>,
    pub rows: Range<usize>,
    /// Rows and what pads them: those see nothing, and their probabilities come out as nought.
    pub wide: usize,
    /// The number of the last key seen, -1 if none. (wide)
    pub last: *mut f32,
    /// Log-sum-exp times log2(e); inf for a query that saw nothing. (wide)
    pub lse: *mut f32,
    /// D = sum of dout out. (wide)
    pub delta: *mut f32,
}

impl<E: Float, G: Float> Job for Known<'_, E, G> {
    /// # Safety
    /// The rows are inside what was checked, and the arrays have room.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        let dim = self.unit.shape.head_dim;
        for lane in 0..self.wide {
            let row = self.rows.start + lane;
            let (mut last, mut lse, mut delta) = (-1.0, f32::INFINITY, 0.0);
            if row < self.rows.end {
                let (place, next) = (self.unit.place(row), self.unit.place(row + AHEAD));
                // SAFETY: as above.
                let kept = unsafe { *self.job.lse.at(0, place.lse) };
                delta = match self.job.delta {
                    Delta::From { out } => {
                        soon(out.at(next.token, next.column), dim);
                        // SAFETY: as above.
                        let [out, dout] = [out, self.job.dout].map(|rows| unsafe {
                            std::slice::from_raw_parts(rows.at(place.token, place.column), dim)
                        });
                        dot(out, dout)
                    }
                    // SAFETY: as above.
                    Delta::Known(known) => unsafe { *known.at(place.token, place.column / dim) },
                };
                last = self.unit.seen(row) as f32 - 1.0;
                lse = if kept == f32::NEG_INFINITY { f32::INFINITY } else { kept * LOG2_E };
            }
            // SAFETY: as above.
            unsafe {
                *self.last.add(lane) = last;
                *self.lse.add(lane) = lse;
                *self.delta.add(lane) = delta;
            }
        }
    }
}

/// Sixteen sums side by side, and then those: a single one would wait for itself.
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
