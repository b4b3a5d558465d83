//! The forward pass on the matrix unit.

use super::pack::{self, padded};
use super::softmax::{Online, Shrink};
use super::tiles::{self, Product};
use crate::Float;
use crate::cpu::amx_tiles::TileConfig;
use crate::cpu::attention::Forward;
use crate::cpu::attention::deal::{self, Grain, Member};
use crate::cpu::attention::room;
use crate::cpu::attention::running::{Finish, Running};
use crate::cpu::attention::softmax::Mask;
use crate::cpu::attention::unit::{Strip, Unit};
use crate::cpu::vector::run;
use crate::cpu::{Level, Scratch};
use std::f32::consts::LOG2_E;
use std::ops::Range;

const QUERIES: usize = 64;
const KEYS: usize = 128;
const GRAIN: Grain = Grain { queries: QUERIES, keys: KEYS };
const LEVEL: Level = Level::Amx;

/// What is kept of a unit and of a block.
struct Arrays {
    keys: *mut u16,          // (k_len, dim)
    values: *mut u16,        // (k_len, dim)
    turned_values: *mut u16, // (tiles, dim, KEYS)
    straight: *mut u16,      // (rows, dim)
    turned: *mut u32,        // (dim / 2, rows)
    scores: *mut f32,        // (KEYS, rows)
    shares: *mut u32,        // (KEYS / 2, rows)
    sums: *mut f32,          // (dim, rows)
    out: *mut f32,           // (rows, dim)
    running: Running,
}

/// A member's share of the blocks.
///
/// # Safety
/// The level is `Amx`, and E is bf16.
pub(in crate::cpu::attention) unsafe fn member<E: Float, O: Float>(
    job: &Forward<'_, E, O>,
    scratch: &Scratch,
    me: Member,
) {
    let shape = job.shape;
    let dim = padded(shape.head_dim);
    // Sizes are in f32: two bf16 to one.
    let (unit, block) = (shape.k_len.next_multiple_of(KEYS) * dim / 2, QUERIES * dim);
    let tile = KEYS * QUERIES;
    let lens = [
        unit,
        unit,
        unit,
        block / 2,
        block / 2,
        tile,
        tile / 2,
        block,
        block,
        QUERIES,
        QUERIES,
        QUERIES,
        QUERIES,
    ];
    room::with(scratch, lens, |rooms| {
        let [keys, values, turned_values, straight, turned, scores, shares, sums, out, rest @ ..] =
            rooms;
        let [last, top, sum, shrink] = rest;
        let arrays = Arrays {
            keys: keys.cast(),
            values: values.cast(),
            turned_values: turned_values.cast(),
            straight: straight.cast(),
            turned: turned.cast(),
            scores,
            shares: shares.cast(),
            sums,
            out,
            running: Running { last, top, sum, shrink },
        };
        // SAFETY: the level is Amx.
        let _tiles = unsafe { TileConfig::load() };
        deal::forward(shape, GRAIN, me, |unit, block, first| {
            // SAFETY: the arrays have room for any unit and block, and the block's rows of out and lse are
            // dealt to nobody else.
            unsafe {
                if first {
                    pack_keys(job, unit, &arrays);
                }
                one_block(job, unit, block, &arrays);
            }
        });
    });
}

unsafe fn pack_keys<E: Float, O: Float>(job: &Forward<'_, E, O>, unit: &Unit<'_>, arrays: &Arrays) {
    let (k_len, dim) = (unit.shape.k_len, unit.shape.head_dim);
    let tokens = unit.batch * k_len..(unit.batch + 1) * k_len;
    let column = unit.kv_head * dim;
    let (from, straight) = (job.k.halves(), arrays.keys);
    let keys = pack::Keys {
        from,
        tokens: tokens.clone(),
        column,
        dim,
        tile: KEYS,
        straight,
        turned: None,
    };
    let (from, straight) = (job.v.halves(), arrays.values);
    // The room of the output is free as yet, and as large as a tile of values in pairs.
    const { assert!(KEYS / 2 <= QUERIES) };
    let turned = Some((arrays.turned_values, arrays.out.cast()));
    let values = pack::Keys { from, tokens, column, dim, tile: KEYS, straight, turned };
    // SAFETY: k and v were checked for all batches and heads.
    unsafe {
        run(LEVEL, keys);
        run(LEVEL, values);
    }
}

unsafe fn one_block<E: Float, O: Float>(
    job: &Forward<'_, E, O>,
    unit: &Unit<'_>,
    rows: Range<usize>,
    arrays: &Arrays,
) {
    let head_dim = unit.shape.head_dim;
    let (dim, wide) = (padded(head_dim), padded(rows.len()));
    let Arrays { straight, turned, running, .. } = *arrays;
    // SAFETY: blocks are within the arrays' sizes, and all reads and writes within what was checked.
    unsafe {
        let from = job.q.halves();
        run(
            LEVEL,
            pack::Queries { unit: *unit, from, rows: rows.clone(), straight, turned, paired: None },
        );
        running.begin(unit, &rows, wide);
        let most = unit.seen(rows.end - 1);
        for first_key in (0..most).step_by(KEYS) {
            let tile = first_key..(first_key + KEYS).min(most);
            for strip in unit.strips(&rows, tile, tiles::GRAIN) {
                one_strip(unit, arrays, (dim, wide), strip);
            }
        }
        run(
            LEVEL,
            pack::Back { dim: head_dim, rows: rows.len(), from: arrays.sums, to: arrays.out },
        );
        run(LEVEL, Finish { job, unit: *unit, rows, running, sums: arrays.out, step: dim });
    }
}

unsafe fn one_strip(unit: &Unit<'_>, arrays: &Arrays, (dim, wide): (usize, usize), strip: Strip) {
    let Strip { lanes, first_key, keys, cuts } = strip;
    let lanes = lanes.start..lanes.start + padded(lanes.len());
    let Arrays { scores, shares, sums, running, .. } = *arrays;
    // SAFETY: lanes and keys are inside the tile, and the tile inside the arrays.
    unsafe {
        Product {
            m: keys,
            n: lanes.len(),
            k: dim,
            a: arrays.keys.add(first_key * dim),
            a_step: dim,
            b: arrays.turned.add(lanes.start),
            b_step: wide,
            c: scores.add(lanes.start),
            c_step: wide,
            add: false,
        }
        .run();
        let factor = unit.shape.scale * LOG2_E;
        let mask = Mask { last: running.last, first_key, cuts };
        run(
            LEVEL,
            Online { keys, lanes: lanes.clone(), wide, scores, factor, mask, running, shares },
        );
        if first_key > 0 {
            run(LEVEL, Shrink { dim, lanes: lanes.clone(), wide, sums, by: running.shrink });
        }
        Product {
            m: dim,
            n: lanes.len(),
            k: keys,
            a: arrays.turned_values.add(first_key * dim),
            a_step: KEYS,
            b: shares.add(lanes.start),
            b_step: wide,
            c: sums.add(lanes.start),
            c_step: wide,
            add: first_key > 0,
        }
        .run();
    }
}
