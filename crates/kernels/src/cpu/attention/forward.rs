//! The forward pass in f32: a block of queries meets the keys it sees tile by tile, with the online softmax
//! in between (FlashAttention-2, Dao 2023). Scores never leave the caches.

use super::Forward;
use super::deal::{self, Grain, Member};
use super::pack::{self, padded};
use super::product::{Product, Start};
use super::room;
use super::running::{Finish, Running};
use super::softmax::{Mask, Online};
use super::unit::{Strip, Unit};
use crate::Float;
use crate::cpu::vector::run;
use crate::cpu::{Level, Scratch};
use std::f32::consts::LOG2_E;
use std::ops::Range;

const QUERIES: usize = 64;
const KEYS: usize = 64;
const GRAIN: Grain = Grain { queries: QUERIES, keys: KEYS };

/// What is kept of a unit and of a block.
struct Arrays {
    keys: *mut f32,     // (k_len, dim)
    values: *mut f32,   // (k_len, dim)
    straight: *mut f32, // (rows, dim)
    turned: *mut f32,   // (dim, rows)
    scores: *mut f32,   // (keys, rows)
    out: *mut f32,      // (rows, dim)
    running: Running,
}

/// A member's share of the blocks.
pub(super) fn member<E: Float, O: Float>(
    job: &Forward<'_, E, O>,
    level: Level,
    scratch: &Scratch,
    me: Member,
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
            let running = Running { last, top, sum, shrink };
            let arrays = Arrays { keys, values, straight, turned, scores, out, running };
            deal::forward(shape, GRAIN, me, |unit, block, first| {
                // SAFETY: the arrays have room for any unit and block, and the block's rows of out and lse are
                // dealt to nobody else.
                unsafe {
                    if first {
                        pack_keys(job, level, unit, &arrays);
                    }
                    one_block(job, level, unit, block, &arrays);
                }
            });
        },
    );
}

unsafe fn pack_keys<E: Float, O: Float>(
    job: &Forward<'_, E, O>,
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

unsafe fn one_block<E: Float, O: Float>(
    job: &Forward<'_, E, O>,
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
        let running = arrays.running;
        running.begin(unit, &rows, wide);
        let most = unit.seen(rows.end - 1);
        for first_key in (0..most).step_by(KEYS) {
            let tile = first_key..(first_key + KEYS).min(most);
            for strip in unit.strips(&rows, tile, 1) {
                one_strip(level, arrays, (head_dim, wide), strip);
            }
        }
        run(level, Finish { job, unit: *unit, rows, running, sums: arrays.out, step: dim });
    }
}

unsafe fn one_strip(level: Level, arrays: &Arrays, (head_dim, wide): (usize, usize), strip: Strip) {
    let Strip { lanes, first_key, keys, cuts } = strip;
    let (dim, across) = (padded(head_dim), padded(lanes.len()));
    let running = arrays.running;
    // SAFETY: lanes and keys are inside the tile, and the tile inside the arrays.
    unsafe {
        let scores = Product {
            m: keys,
            n: across,
            k: head_dim,
            a: arrays.keys.add(first_key * dim),
            a_steps: (dim, 1),
            b: arrays.turned.add(lanes.start),
            b_step: wide,
            c: arrays.scores.add(lanes.start),
            c_step: wide,
            start: Start::Fresh,
        };
        run(level, scores);
        let mask = Mask { last: running.last, first_key, cuts };
        let (scores, across) = (arrays.scores, lanes.start..lanes.start + across);
        run(level, Online { keys, lanes: across, wide, scores, mask, running });
        let shrink = Start::Scale(running.shrink.add(lanes.start));
        let out = Product {
            m: lanes.len(),
            n: dim,
            k: keys,
            a: scores.add(lanes.start),
            a_steps: (1, wide),
            b: arrays.values.add(first_key * dim),
            b_step: dim,
            c: arrays.out.add(lanes.start * dim),
            c_step: dim,
            start: if first_key == 0 { Start::Fresh } else { shrink },
        };
        run(level, out);
    }
}
