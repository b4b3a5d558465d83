//! The backward pass on the matrix unit.

use super::pack::{self, padded};
use super::softmax::Gradient;
use super::tiles::{self, Product};
use crate::Float;
use crate::cpu::amx_tiles::TileConfig;
use crate::cpu::attention::Backward;
use crate::cpu::attention::deal::{self, Grain, Member, Want};
use crate::cpu::attention::known::Known;
use crate::cpu::attention::room;
use crate::cpu::attention::softmax::Mask;
use crate::cpu::attention::unit::{Strip, Unit};
use crate::cpu::attention::write::{Write, WriteQueries};
use crate::cpu::vector::run;
use crate::cpu::{Level, Scratch};
use std::f32::consts::LOG2_E;
use std::ops::Range;

const QUERIES: usize = 64;
const KEYS: usize = 64;
const GRAIN: Grain = Grain { queries: QUERIES, keys: KEYS };
const LEVEL: Level = Level::Amx;

/// What is kept of a unit and of a block.
struct Arrays {
    keys: *mut u16,        // (k_len, dim)
    values: *mut u16,      // (k_len, dim)
    turned_keys: *mut u16, // (tiles, dim, KEYS)
    dkeys: *mut f32,       // (k_len, dim)
    dvalues: *mut f32,     // (k_len, dim)
    queries: Ways,
    douts: Ways,
    turned_dqueries: *mut f32, // (dim, rows)
    dqueries: *mut f32,        // (rows, dim)
    scores: *mut f32,          // (KEYS, rows)
    slopes: *mut f32,          // (KEYS, rows)
    shares: *mut u16,          // (KEYS, rows)
    dscores: *mut u16,         // (KEYS, rows)
    paired: *mut u32,          // (KEYS / 2, rows)
    last: *mut f32,            // (rows)
    lse: *mut f32,             // (rows)
    delta: *mut f32,           // (rows)
}

/// A block of queries or of their gradients.
#[derive(Clone, Copy)]
struct Ways {
    straight: *mut u16, // (rows, dim)
    turned: *mut u32,   // (dim / 2, rows)
    paired: *mut u32,   // (rows / 2, dim)
}

/// A member's share of the tiles.
///
/// # Safety
/// The level is `Amx`, and E is bf16.
pub(in crate::cpu::attention) unsafe fn member<E: Float, G: Float>(
    job: &Backward<'_, E, G>,
    scratch: &Scratch,
    me: Member,
) {
    let shape = job.shape;
    let dim = padded(shape.head_dim);
    // Sizes are in f32: two bf16 to one.
    let (u, b) = (shape.k_len.next_multiple_of(KEYS) * dim, QUERIES * dim);
    let (h, t) = (b / 2, KEYS * QUERIES);
    let unit = [u / 2, u / 2, u / 2, u, u];
    let block = [h, h, h, h, h, h, b, b, QUERIES, QUERIES, QUERIES];
    let tile = [t, t, t / 2, t / 2, t / 2];
    room::with(
        scratch,
        [unit.iter().sum(), block.iter().sum(), tile.iter().sum()],
        |[of_unit, of_block, of_tile]| {
            let [keys, values, turned_keys, dkeys, dvalues] = room::cut(of_unit, unit);
            let [q, qt, qp, d, dt, dp, turned_dqueries, dqueries, last, lse, delta] =
                room::cut(of_block, block);
            let [scores, slopes, shares, dscores, paired] = room::cut(of_tile, tile);
            let arrays = Arrays {
                keys: keys.cast(),
                values: values.cast(),
                turned_keys: turned_keys.cast(),
                dkeys,
                dvalues,
                queries: Ways { straight: q.cast(), turned: qt.cast(), paired: qp.cast() },
                douts: Ways { straight: d.cast(), turned: dt.cast(), paired: dp.cast() },
                turned_dqueries,
                dqueries,
                scores,
                slopes,
                shares: shares.cast(),
                dscores: dscores.cast(),
                paired: paired.cast(),
                last,
                lse,
                delta,
            };
            // SAFETY: the level is Amx.
            let _tiles = unsafe { TileConfig::load() };
            deal::backward(shape, GRAIN, me, |unit, want| {
                // SAFETY: the arrays have room for any unit, and what is written is dealt to nobody else.
                unsafe { one_unit(job, unit, &arrays, want) };
            });
        },
    );
}

unsafe fn one_unit<E: Float, G: Float>(
    job: &Backward<'_, E, G>,
    unit: &Unit<'_>,
    arrays: &Arrays,
    want: Want,
) {
    let (k_len, head_dim) = (unit.shape.k_len, unit.shape.head_dim);
    let dim = padded(head_dim);
    let keys = (want.tiles.start * KEYS).min(k_len)..(want.tiles.end * KEYS).min(k_len);
    let tokens = unit.batch * k_len + keys.start..unit.batch * k_len + keys.end;
    let (column, at) = (unit.kv_head * head_dim, keys.start * dim);
    // SAFETY: all rows are inside what was checked, and the arrays have room for them.
    unsafe {
        // The room of dq is free as yet, and as large as a tile of keys in pairs.
        const { assert!(KEYS / 2 <= QUERIES) };
        let turned = Some((arrays.turned_keys.add(at), arrays.dqueries.cast()));
        let (from, straight) = (job.k.halves(), arrays.keys.add(at));
        run(
            LEVEL,
            pack::Keys {
                from,
                tokens: tokens.clone(),
                column,
                dim: head_dim,
                tile: KEYS,
                straight,
                turned,
            },
        );
        let (from, straight) = (job.v.halves(), arrays.values.add(at));
        let turned = None;
        run(
            LEVEL,
            pack::Keys {
                from,
                tokens: tokens.clone(),
                column,
                dim: head_dim,
                tile: KEYS,
                straight,
                turned,
            },
        );
        if want.dkv {
            let whole = keys.len().next_multiple_of(KEYS) * dim;
            arrays.dkeys.add(at).write_bytes(0, whole);
            arrays.dvalues.add(at).write_bytes(0, whole);
        }
        for block in want.blocks.clone() {
            one_block(job, unit, unit.block(QUERIES, block), arrays, &want);
        }
        if want.dkv {
            let factors = [unit.shape.scale, 1.0];
            for (from, to, factor) in
                [(arrays.dkeys, job.dk, factors[0]), (arrays.dvalues, job.dv, factors[1])]
            {
                let tokens = tokens.clone();
                run(
                    LEVEL,
                    Write {
                        from: from.add(at),
                        step: dim,
                        to,
                        tokens,
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
        for (from, ways) in [(job.q, arrays.queries), (job.dout, arrays.douts)] {
            let Ways { straight, turned, paired } = ways;
            let (from, paired) = (from.halves(), Some(paired));
            run(
                LEVEL,
                pack::Queries { unit: *unit, from, rows: rows.clone(), straight, turned, paired },
            );
        }
        let Arrays { last, lse, delta, .. } = *arrays;
        run(LEVEL, Known { job, unit: *unit, rows: rows.clone(), wide, last, lse, delta });
        if want.dq {
            arrays.turned_dqueries.write_bytes(0, wide * dim);
        }
        for first_key in
            want.tiles.clone().map(|tile| tile * KEYS).take_while(|first| *first < most)
        {
            let tile = first_key..(first_key + KEYS).min(most);
            for strip in unit.strips(&rows, tile, tiles::GRAIN) {
                let lanes = strip.lanes.start..strip.lanes.start + padded(strip.lanes.len());
                Tile { unit, arrays, strip, lanes, dim, wide }.run(want);
            }
        }
        if want.dq {
            let (from, to) = (arrays.turned_dqueries, arrays.dqueries);
            run(LEVEL, pack::Back { dim: head_dim, rows: rows.len(), from, to });
            let (from, to, factor) = (arrays.dqueries, job.dq, unit.shape.scale);
            let add = job.add;
            run(LEVEL, WriteQueries { from, step: dim, to, unit: *unit, rows, factor, add });
        }
    }
}

/// Some queries of a block with some keys of a tile.
struct Tile<'a> {
    unit: &'a Unit<'a>,
    arrays: &'a Arrays,
    strip: Strip,
    /// The strip's, and what pads them.
    lanes: Range<usize>,
    dim: usize,
    wide: usize,
}

impl Tile<'_> {
    unsafe fn run(&self, want: &Want) {
        let Tile { unit, arrays, ref lanes, dim, wide, .. } = *self;
        let Strip { first_key, keys, cuts, .. } = self.strip;
        let Arrays { scores, slopes, shares, dscores, paired, last, lse, delta, .. } = *arrays;
        let at = first_key * dim;
        // SAFETY: lanes and keys are inside the tile, and the tile inside the arrays.
        unsafe {
            self.scores(arrays.keys.add(at), arrays.queries.turned, scores);
            self.scores(arrays.values.add(at), arrays.douts.turned, slopes);
            let factor = unit.shape.scale * LOG2_E;
            let mask = Mask { last, first_key, cuts };
            run(
                LEVEL,
                Gradient {
                    keys,
                    lanes: lanes.clone(),
                    wide,
                    scores,
                    factor,
                    slopes,
                    mask,
                    lse,
                    delta,
                    shares,
                    dscores,
                    paired,
                },
            );
            if want.dkv {
                self.to_keys(shares, arrays.douts.paired, arrays.dvalues.add(at));
                self.to_keys(dscores, arrays.queries.paired, arrays.dkeys.add(at));
            }
            if want.dq {
                Product {
                    m: dim,
                    n: lanes.len(),
                    k: keys,
                    a: arrays.turned_keys.add(at),
                    a_step: KEYS,
                    b: paired.add(lanes.start),
                    b_step: wide,
                    c: arrays.turned_dqueries.add(lanes.start),
                    c_step: wide,
                    add: true,
                }
                .run();
            }
        }
    }

    /// (keys, dim) · (dim, lanes) → (keys, lanes)
    unsafe fn scores(&self, a: *const u16, turned: *const u32, to: *mut f32) {
        let Tile { ref lanes, dim, wide, .. } = *self;
        let keys = self.strip.keys;
        let (b, c) = (turned.wrapping_add(lanes.start), to.wrapping_add(lanes.start));
        // SAFETY: the arrays are as large as their names say.
        unsafe {
            Product {
                m: keys,
                n: lanes.len(),
                k: dim,
                a,
                a_step: dim,
                b,
                b_step: wide,
                c,
                c_step: wide,
                add: false,
            }
            .run()
        }
    }

    /// (keys, lanes) · (lanes, dim) → (keys, dim), added
    unsafe fn to_keys(&self, tile: *const u16, paired: *const u32, c: *mut f32) {
        let Tile { ref lanes, dim, wide, .. } = *self;
        let keys = self.strip.keys;
        let (a, b) = (tile.wrapping_add(lanes.start), paired.wrapping_add(lanes.start / 2 * dim));
        // SAFETY: the arrays are as large as their names say.
        unsafe {
            Product {
                m: keys,
                n: dim,
                k: lanes.len(),
                a,
                a_step: wide,
                b,
                b_step: dim,
                c,
                c_step: dim,
                add: true,
            }
            .run()
        }
    }
}
