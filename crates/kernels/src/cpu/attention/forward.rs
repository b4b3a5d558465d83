//! The forward pass in f32: a block of queries meets the keys it sees tile by tile, with the online softmax
//! in between (FlashAttention-2, Dao 2023). Scores never leave the caches.

use super::Forward;
use super::pack::{self, padded};
use super::product::{Product, Start};
use super::room;
use super::softmax::{Mask, NO_MAX, Online};
use super::unit::{Deal, KEYS, QUERIES, Unit};
use crate::Float;
use crate::cpu::vector::{Job, Vector, run};
use crate::cpu::{Level, Scratch};
use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

/// What is kept of a unit and of a block.
struct Arrays {
    keys: *mut f32,     // (k_len, dim)
    values: *mut f32,   // (k_len, dim)
    straight: *mut f32, // (rows, dim)
    turned: *mut f32,   // (dim, rows)
    scores: *mut f32,   // (keys, rows)
    out: *mut f32,      // (rows, dim)
    last: *mut f32,     // (rows)
    top: *mut f32,      // (rows)
    sum: *mut f32,      // (rows)
    shrink: *mut f32,   // (rows)
}

/// A member's share of the blocks.
pub(super) fn member<E: Float>(
    job: &Forward<'_, E>,
    level: Level,
    scratch: &Scratch,
    member: usize,
    size: usize,
) {
    let shape = job.shape;
    let dim = padded(shape.head_dim);
    let (unit_rows, block_rows) = (shape.k_len * dim, QUERIES * dim);
    let lens = [unit_rows, unit_rows, block_rows, block_rows, KEYS * QUERIES, block_rows];
    let [keys, values, straight, turned, scores, out] = lens;
    let lens = [keys, values, straight, turned, scores, out, QUERIES, QUERIES, QUERIES, QUERIES];
    room::with(
        scratch,
        lens,
        |[keys, values, straight, turned, scores, out, last, top, sum, shrink]| {
            let arrays =
                Arrays { keys, values, straight, turned, scores, out, last, top, sum, shrink };
            let mut deal = Deal::new(job.units() * unit_cost(&Unit::nth(shape, 0)), member, size);
            for number in 0..job.units() {
                let unit = Unit::nth(shape, number);
                let mut packed = false;
                for block in (0..unit.blocks()).map(|block| unit.block(block)) {
                    if !deal.next(block_cost(&unit, &block)) {
                        continue;
                    }
                    // SAFETY: the arrays have room for any unit and block, and the block's rows of out and lse are
                    // dealt to nobody else.
                    unsafe {
                        if !packed {
                            pack_keys(job, level, &unit, &arrays);
                            packed = true;
                        }
                        one_block(job, level, &unit, block, &arrays);
                    }
                }
            }
        },
    );
}

/// In keys met, and what a block costs by itself.
fn block_cost(unit: &Unit<'_>, block: &Range<usize>) -> usize {
    unit.seen(block.end - 1) + 16
}

fn unit_cost(unit: &Unit<'_>) -> usize {
    (0..unit.blocks()).map(|block| block_cost(unit, &unit.block(block))).sum()
}

unsafe fn pack_keys<E: Float>(
    job: &Forward<'_, E>,
    level: Level,
    unit: &Unit<'_>,
    arrays: &Arrays,
) {
    let k_len = unit.shape.k_len;
    let dim = unit.shape.head_dim;
    for (from, to) in [(job.k, arrays.keys), (job.v, arrays.values)] {
        let tokens = unit.batch * k_len..(unit.batch + 1) * k_len;
        // SAFETY: k and v were checked for all batches and heads.
        unsafe { run(level, pack::Keys { from, tokens, column: unit.kv_head * dim, dim, to }) };
    }
}

unsafe fn one_block<E: Float>(
    job: &Forward<'_, E>,
    level: Level,
    unit: &Unit<'_>,
    rows: Range<usize>,
    arrays: &Arrays,
) {
    let head_dim = unit.shape.head_dim;
    let (dim, wide) = (padded(head_dim), padded(rows.len()));
    let factor = unit.shape.scale * LOG2_E;
    // SAFETY: blocks are within the arrays' sizes, and all reads and writes within what was checked.
    unsafe {
        let (straight, turned) = (arrays.straight, arrays.turned);
        run(
            level,
            pack::Queries {
                unit: *unit,
                from: job.q,
                rows: rows.clone(),
                straight,
                turned,
                factor,
            },
        );
        for lane in 0..wide {
            let row = (rows.start + lane).min(rows.end - 1);
            *arrays.last.add(lane) = unit.seen(row) as f32 - 1.0;
            *arrays.top.add(lane) = NO_MAX;
            *arrays.sum.add(lane) = 0.0;
        }
        let (least, most) = (unit.seen(rows.start), unit.seen(rows.end - 1));
        for first_key in (0..most).step_by(KEYS) {
            let keys = KEYS.min(most - first_key);
            run(
                level,
                Product {
                    m: keys,
                    n: wide,
                    k: head_dim,
                    a: arrays.keys.add(first_key * dim),
                    a_steps: (dim, 1),
                    b: turned,
                    b_step: wide,
                    c: arrays.scores,
                    c_step: wide,
                    start: Start::Fresh,
                },
            );
            let mask = Mask { last: arrays.last, first_key, cuts: least < first_key + keys };
            let Arrays { scores, top, sum, shrink, .. } = *arrays;
            run(level, Online { keys, queries: wide, scores, mask, top, sum, shrink });
            run(
                level,
                Product {
                    m: rows.len(),
                    n: dim,
                    k: keys,
                    a: scores,
                    a_steps: (1, wide),
                    b: arrays.values.add(first_key * dim),
                    b_step: dim,
                    c: arrays.out,
                    c_step: dim,
                    start: if first_key == 0 { Start::Fresh } else { Start::Scale(shrink) },
                },
            );
        }
        run(level, Finish { job, unit: *unit, rows, arrays });
    }
}

/// Divides a block's sums by their weights.
struct Finish<'a, E> {
    job: &'a Forward<'a, E>,
    unit: Unit<'a>,
    rows: Range<usize>,
    arrays: &'a Arrays,
}

impl<E: Float> Job for Finish<'_, E> {
    /// # Safety
    /// The rows were dealt to this member, and out and lse checked for them.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        let head_dim = self.unit.shape.head_dim;
        for (lane, row) in self.rows.enumerate() {
            let place = self.unit.place(row);
            // SAFETY: as above.
            unsafe {
                let (top, sum) = (*self.arrays.top.add(lane), *self.arrays.sum.add(lane));
                let out = self.job.out.at(place.token, place.column);
                let lse = self.job.lse.at(0, place.lse);
                if self.unit.seen(row) == 0 {
                    std::slice::from_raw_parts_mut(out, head_dim).fill(E::narrow(0.0));
                    *lse = f32::NEG_INFINITY;
                    continue;
                }
                let from = self.arrays.out.add(lane * padded(head_dim));
                pack::narrow(from, head_dim, 1.0 / sum, out);
                *lse = (top + sum.log2()) * LN_2;
            }
        }
    }
}
