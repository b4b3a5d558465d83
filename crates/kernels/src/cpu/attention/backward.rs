//! The backward pass in f32: every tile of probabilities is computed again from the log-sum-exp and used up at
//! once. Sums are taken in one order, key tiles and query blocks ascending, whoever takes them.

use super::Backward;
use super::deal::{self, Grain, Member, Want};
use super::known::Known;
use super::pack::{self, padded};
use super::product::{Product, Start};
use super::room;
use super::softmax::{Gradient, Mask};
use super::unit::Unit;
use super::write::{Write, WriteQueries};
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
    keys: *mut f32,           // (k_len, dim)
    values: *mut f32,         // (k_len, dim)
    dkeys: *mut f32,          // (k_len, dim)
    dvalues: *mut f32,        // (k_len, dim)
    queries: *mut f32,        // (rows, dim)
    turned_queries: *mut f32, // (dim, rows)
    douts: *mut f32,          // (rows, dim)
    turned_douts: *mut f32,   // (dim, rows)
    dqueries: *mut f32,       // (rows, dim)
    scores: *mut f32,         // (keys, rows)
    slopes: *mut f32,         // (keys, rows)
    last: *mut f32,           // (rows)
    lse: *mut f32,            // (rows)
    delta: *mut f32,          // (rows)
}

/// A member's share of the tiles.
pub(super) fn member<E: Float>(job: &Backward<'_, E>, level: Level, scratch: &Scratch, me: Member) {
    let shape = job.shape;
    let dim = padded(shape.head_dim);
    let (u, b, t) = (shape.k_len * dim, QUERIES * dim, KEYS * QUERIES);
    let lens = [u, u, u, u, b, b, b, b, b, t, t, QUERIES, QUERIES, QUERIES];
    room::with(scratch, lens, |rooms| {
        let [keys, values, dkeys, dvalues, queries, turned_queries, douts, turned_douts, ..] =
            rooms;
        let [.., dqueries, scores, slopes, last, lse, delta] = rooms;
        let arrays = Arrays {
            keys,
            values,
            dkeys,
            dvalues,
            queries,
            turned_queries,
            douts,
            turned_douts,
            dqueries,
            scores,
            slopes,
            last,
            lse,
            delta,
        };
        deal::backward(shape, GRAIN, me, |unit, want| {
            // SAFETY: the arrays have room for any unit, and what is written is dealt to nobody else.
            unsafe { one_unit(job, level, unit, &arrays, want) };
        });
    });
}

unsafe fn one_unit<E: Float>(
    job: &Backward<'_, E>,
    level: Level,
    unit: &Unit<'_>,
    arrays: &Arrays,
    want: Want,
) {
    let (k_len, head_dim) = (unit.shape.k_len, unit.shape.head_dim);
    let dim = padded(head_dim);
    let keys = (want.tiles.start * KEYS).min(k_len)..(want.tiles.end * KEYS).min(k_len);
    let tokens = unit.batch * k_len + keys.start..unit.batch * k_len + keys.end;
    let column = unit.kv_head * head_dim;
    // SAFETY: all rows are inside what was checked, and the arrays have room for them.
    unsafe {
        for (from, to) in [(job.k, arrays.keys), (job.v, arrays.values)] {
            let to = to.add(keys.start * dim);
            run(level, pack::Keys { from, tokens: tokens.clone(), column, dim: head_dim, to });
        }
        if want.dkv {
            arrays.dkeys.add(keys.start * dim).write_bytes(0, keys.len() * dim);
            arrays.dvalues.add(keys.start * dim).write_bytes(0, keys.len() * dim);
        }
        for block in want.blocks.clone() {
            one_block(job, level, unit, unit.block(QUERIES, block), arrays, &want);
        }
        if want.dkv {
            let scale = unit.shape.scale;
            for (from, to, factor) in [(arrays.dkeys, job.dk, scale), (arrays.dvalues, job.dv, 1.0)]
            {
                run(
                    level,
                    Write {
                        step: dim,
                        from: from.add(keys.start * dim),
                        to,
                        tokens: tokens.clone(),
                        column,
                        dim: head_dim,
                        factor,
                    },
                );
            }
        }
    }
}

unsafe fn one_block<E: Float>(
    job: &Backward<'_, E>,
    level: Level,
    unit: &Unit<'_>,
    rows: Range<usize>,
    arrays: &Arrays,
    want: &Want,
) {
    let head_dim = unit.shape.head_dim;
    let (dim, wide) = (padded(head_dim), padded(rows.len()));
    let (least, most) = (unit.seen(rows.start), unit.seen(rows.end - 1));
    if !want.dq && most <= want.tiles.start * KEYS {
        return;
    }
    // SAFETY: blocks are within the arrays' sizes, and all reads and writes within what was checked.
    unsafe {
        let (straight, turned) = (arrays.queries, arrays.turned_queries);
        let factor = unit.shape.scale * LOG2_E;
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
        let (straight, turned) = (arrays.douts, arrays.turned_douts);
        run(
            level,
            pack::Queries {
                unit: *unit,
                from: job.dout,
                rows: rows.clone(),
                straight,
                turned,
                factor: 1.0,
            },
        );
        let Arrays { last, lse, delta, .. } = *arrays;
        run(level, Known { job, unit: *unit, rows: rows.clone(), wide, last, lse, delta });
        if want.dq {
            arrays.dqueries.write_bytes(0, rows.len() * dim);
        }
        for tile in want.tiles.clone() {
            let first_key = tile * KEYS;
            if first_key >= most {
                break;
            }
            let keys = KEYS.min(most - first_key);
            let mask = Mask { last: arrays.last, first_key, cuts: least < first_key + keys };
            let (at, tile) =
                (first_key * dim, Tile { level, rows: rows.len(), wide, keys, head_dim, dim });
            tile.scores(arrays.keys.add(at), arrays.turned_queries, arrays.scores);
            tile.scores(arrays.values.add(at), arrays.turned_douts, arrays.slopes);
            let Arrays { scores, slopes, lse, delta, .. } = *arrays;
            run(level, Gradient { keys, queries: wide, scores, slopes, mask, lse, delta });
            if want.dkv {
                tile.to_keys(scores, arrays.douts, arrays.dvalues.add(at));
                tile.to_keys(slopes, arrays.queries, arrays.dkeys.add(at));
            }
            if want.dq {
                tile.to_queries(slopes, arrays.keys.add(at), arrays.dqueries);
            }
        }
        if want.dq {
            let scale = unit.shape.scale;
            run(
                level,
                WriteQueries {
                    step: dim,
                    from: arrays.dqueries,
                    to: job.dq,
                    unit: *unit,
                    rows,
                    factor: scale,
                },
            );
        }
    }
}

/// The products of one tile of keys with one block of queries.
struct Tile {
    level: Level,
    rows: usize,
    wide: usize,
    keys: usize,
    head_dim: usize,
    dim: usize,
}

impl Tile {
    /// (keys, dim) · (dim, rows) → (keys, rows)
    unsafe fn scores(&self, keys: *const f32, turned: *const f32, to: *mut f32) {
        let product = Product {
            m: self.keys,
            n: self.wide,
            k: self.head_dim,
            a: keys,
            a_steps: (self.dim, 1),
            b: turned,
            b_step: self.wide,
            c: to,
            c_step: self.wide,
            start: Start::Fresh,
        };
        // SAFETY: the arrays are as large as their names say.
        unsafe { run(self.level, product) }
    }

    /// (keys, rows) · (rows, dim) → (keys, dim), added
    unsafe fn to_keys(&self, tile: *const f32, straight: *const f32, to: *mut f32) {
        let product = Product {
            m: self.keys,
            n: self.dim,
            k: self.rows,
            a: tile,
            a_steps: (self.wide, 1),
            b: straight,
            b_step: self.dim,
            c: to,
            c_step: self.dim,
            start: Start::Add,
        };
        // SAFETY: the arrays are as large as their names say.
        unsafe { run(self.level, product) }
    }

    /// (keys, rows) turned · (keys, dim) → (rows, dim), added
    unsafe fn to_queries(&self, tile: *const f32, keys: *const f32, to: *mut f32) {
        let product = Product {
            m: self.rows,
            n: self.dim,
            k: self.keys,
            a: tile,
            a_steps: (1, self.wide),
            b: keys,
            b_step: self.dim,
            c: to,
            c_step: self.dim,
            start: Start::Add,
        };
        // SAFETY: the arrays are as large as their names say.
        unsafe { run(self.level, product) }
    }
}
