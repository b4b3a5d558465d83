//! The backward pass in f32: every tile of probabilities is computed again from the log-sum-exp and used up at
//! once. Sums are taken in one order, key tiles and query blocks ascending, whoever takes them.

use super::Backward;
use super::deal::{self, Grain, Member, Want};
use super::known::Known;
use super::pack::{self, padded};
use super::product::{Product, Start};
use super::room;
use super::softmax::{Gradient, Mask};
use super::unit::{Strip, Unit};
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
pub(super) fn member<E: Float, G: Float>(
    job: &Backward<'_, E, G>,
    level: Level,
    scratch: &Scratch,
    me: Member,
) {
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

unsafe fn one_unit<E: Float, G: Float>(
    job: &Backward<'_, E, G>,
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
                        add: job.add,
                    },
                );
            }
        }
    }
}

unsafe fn one_block<E: Float, G: Float>(
    job: &Backward<'_, E, G>,
    level: Level,
    unit: &Unit<'_>,
    rows: Range<usize>,
    arrays: &Arrays,
    want: &Want,
) {
    let head_dim = unit.shape.head_dim;
    let (dim, wide) = (padded(head_dim), padded(rows.len()));
    let most = unit.seen(rows.end - 1);
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
        for first_key in
            want.tiles.clone().map(|tile| tile * KEYS).take_while(|first| *first < most)
        {
            let tile = first_key..(first_key + KEYS).min(most);
            for strip in unit.strips(&rows, tile, 1) {
                Tile { level, arrays, strip, wide, head_dim, dim }.run(want);
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
                    add: job.add,
                },
            );
        }
    }
}

/// Some queries of a block with some keys of a tile.
struct Tile<'a> {
    level: Level,
    arrays: &'a Arrays,
    strip: Strip,
    wide: usize,
    head_dim: usize,
    dim: usize,
}

impl Tile<'_> {
    unsafe fn run(&self, want: &Want) {
        let Strip { ref lanes, first_key, keys, cuts } = self.strip;
        let Arrays { scores, slopes, last, lse, delta, .. } = *self.arrays;
        let (at, lanes) = (first_key * self.dim, lanes.start..lanes.start + padded(lanes.len()));
        let (arrays, wide) = (self.arrays, self.wide);
        // SAFETY: lanes and keys are inside the tile, and the tile inside the arrays.
        unsafe {
            self.scores(arrays.keys.add(at), arrays.turned_queries, scores);
            self.scores(arrays.values.add(at), arrays.turned_douts, slopes);
            let mask = Mask { last, first_key, cuts };
            run(self.level, Gradient { keys, lanes, wide, scores, slopes, mask, lse, delta });
            if want.dkv {
                self.to_keys(scores, arrays.douts, arrays.dvalues.add(at));
                self.to_keys(slopes, arrays.queries, arrays.dkeys.add(at));
            }
            if want.dq {
                self.to_queries(slopes, arrays.keys.add(at), arrays.dqueries);
            }
        }
    }

    /// (keys, dim) · (dim, lanes) → (keys, lanes)
    unsafe fn scores(&self, keys: *const f32, turned: *const f32, to: *mut f32) {
        let lanes = &self.strip.lanes;
        let product = Product {
            m: self.strip.keys,
            n: padded(lanes.len()),
            k: self.head_dim,
            a: keys,
            a_steps: (self.dim, 1),
            b: turned.wrapping_add(lanes.start),
            b_step: self.wide,
            c: to.wrapping_add(lanes.start),
            c_step: self.wide,
            start: Start::Fresh,
        };
        // SAFETY: the arrays are as large as their names say.
        unsafe { run(self.level, product) }
    }

    /// (keys, lanes) · (lanes, dim) → (keys, dim), added
    unsafe fn to_keys(&self, tile: *const f32, straight: *const f32, to: *mut f32) {
        let lanes = &self.strip.lanes;
        let product = Product {
            m: self.strip.keys,
            n: self.dim,
            k: lanes.len(),
            a: tile.wrapping_add(lanes.start),
            a_steps: (self.wide, 1),
            b: straight.wrapping_add(lanes.start * self.dim),
            b_step: self.dim,
            c: to,
            c_step: self.dim,
            start: Start::Add,
        };
        // SAFETY: the arrays are as large as their names say.
        unsafe { run(self.level, product) }
    }

    /// (keys, lanes) turned · (keys, dim) → (lanes, dim), added
    unsafe fn to_queries(&self, tile: *const f32, keys: *const f32, to: *mut f32) {
        let lanes = &self.strip.lanes;
        let product = Product {
            m: lanes.len(),
            n: self.dim,
            k: self.strip.keys,
            a: tile.wrapping_add(lanes.start),
            a_steps: (1, self.wide),
            b: keys,
            b_step: self.dim,
            c: to.wrapping_add(lanes.start * self.dim),
            c_step: self.dim,
            start: Start::Add,
        };
        // SAFETY: the arrays are as large as their names say.
        unsafe { run(self.level, product) }
    }
}
