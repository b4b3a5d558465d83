//! The forward pass on AMX.

use super::pack::{self, padded};
use super::product::{Product, TILE};
use super::softmax::{OnlineSoftmax, Rescale};
use crate::Float;
use crate::cpu::amx_tiles::TileConfig;
use crate::cpu::attention::Forward;
use crate::cpu::attention::head_group::{HeadGroup, SubTile};
use crate::cpu::attention::partition::{self, BlockSizes, Worker};
use crate::cpu::attention::scratch_arrays;
use crate::cpu::attention::softmax::Mask;
use crate::cpu::attention::softmax_state::{SoftmaxState, StoreOutput};
use crate::cpu::vector::dispatch;
use crate::cpu::{Level, Scratch};
use std::f32::consts::LOG2_E;
use std::ops::Range;

const QUERIES: usize = 64;
const KEYS: usize = 128;
const BLOCK_SIZES: BlockSizes = BlockSizes { queries: QUERIES, keys: KEYS };
const LEVEL: Level = Level::Amx;

/// Buffers of one head group and one block of queries.
struct Buffers {
    keys: *mut u16,              // (k_len, dim)
    values: *mut u16,            // (k_len, dim)
    transposed_values: *mut u16, // (tiles, dim, KEYS)
    row_major: *mut u16,         // (rows, dim)
    transposed: *mut u32,        // (dim / 2, rows)
    scores: *mut f32,            // (KEYS, rows)
    probs: *mut u32,             // (KEYS / 2, rows)
    sums: *mut f32,              // (dim, rows)
    out: *mut f32,               // (rows, dim)
    state: SoftmaxState,
}

/// Computes the blocks of one worker.
///
/// # Safety
/// The level is `Amx`, and E is bf16.
pub(in crate::cpu::attention) unsafe fn run_worker<E: Float, O: Float>(
    job: &Forward<'_, E, O>,
    scratch: &Scratch,
    worker: Worker,
) {
    let shape = job.shape;
    let dim = padded(shape.head_dim);
    // Sizes count f32; two bf16 take one.
    let (group, block) = (shape.k_len.next_multiple_of(KEYS) * dim / 2, QUERIES * dim);
    let tile = KEYS * QUERIES;
    let lens = [
        group,
        group,
        group,
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
    scratch_arrays::with(scratch, lens, |arrays| {
        let [
            keys,
            values,
            transposed_values,
            row_major,
            transposed,
            scores,
            probs,
            sums,
            out,
            rest @ ..,
        ] = arrays;
        let [last_key, max, sum, rescale] = rest;
        let buffers = Buffers {
            keys: keys.cast(),
            values: values.cast(),
            transposed_values: transposed_values.cast(),
            row_major: row_major.cast(),
            transposed: transposed.cast(),
            scores,
            probs: probs.cast(),
            sums,
            out,
            state: SoftmaxState { last_key, max, sum, rescale },
        };
        // SAFETY: the level is Amx.
        let _tiles = unsafe { TileConfig::load() };
        partition::forward(shape, BLOCK_SIZES, worker, |group, block, first_of_group| {
            // SAFETY: the buffers can hold any head group and block, and no other thread writes the block's
            // rows of out and lse.
            unsafe {
                if first_of_group {
                    pack_keys(job, group, &buffers);
                }
                query_block(job, group, block, &buffers);
            }
        });
    });
}

unsafe fn pack_keys<E: Float, O: Float>(
    job: &Forward<'_, E, O>,
    group: &HeadGroup<'_>,
    buffers: &Buffers,
) {
    let (k_len, dim) = (group.shape.k_len, group.shape.head_dim);
    let tokens = group.batch * k_len..(group.batch + 1) * k_len;
    let column = group.kv_head * dim;
    let (from, row_major) = (job.k.as_bits(), buffers.keys);
    let keys = pack::PackKeys {
        from,
        tokens: tokens.clone(),
        column,
        dim,
        tile: KEYS,
        row_major,
        transposed: None,
    };
    let (from, row_major) = (job.v.as_bits(), buffers.values);
    // The buffer of the output is still free, and large enough for a tile of values in pairs.
    const { assert!(KEYS / 2 <= QUERIES) };
    let transposed = Some((buffers.transposed_values, buffers.out.cast()));
    let values = pack::PackKeys { from, tokens, column, dim, tile: KEYS, row_major, transposed };
    // SAFETY: k and v were checked for all batches and heads.
    unsafe {
        dispatch(LEVEL, keys);
        dispatch(LEVEL, values);
    }
}

unsafe fn query_block<E: Float, O: Float>(
    job: &Forward<'_, E, O>,
    group: &HeadGroup<'_>,
    rows: Range<usize>,
    buffers: &Buffers,
) {
    let head_dim = group.shape.head_dim;
    let (dim, width) = (padded(head_dim), padded(rows.len()));
    let Buffers { row_major, transposed, state, .. } = *buffers;
    // SAFETY: the buffers can hold any block; all reads and writes are within the checked range.
    unsafe {
        let from = job.q.as_bits();
        dispatch(
            LEVEL,
            pack::PackQueries {
                group: *group,
                from,
                rows: rows.clone(),
                row_major,
                transposed,
                pairs: None,
            },
        );
        state.init(group, &rows, width);
        let visible = group.visible_keys(rows.end - 1);
        for first_key in (0..visible).step_by(KEYS) {
            let tile = first_key..(first_key + KEYS).min(visible);
            for sub_tile in group.sub_tiles(&rows, tile, TILE) {
                multiply_sub_tile(group, buffers, (dim, width), sub_tile);
            }
        }
        dispatch(
            LEVEL,
            pack::TransposeBack {
                dim: head_dim,
                rows: rows.len(),
                from: buffers.sums,
                to: buffers.out,
            },
        );
        dispatch(
            LEVEL,
            StoreOutput { job, group: *group, rows, state, sums: buffers.out, row_stride: dim },
        );
    }
}

unsafe fn multiply_sub_tile(
    group: &HeadGroup<'_>,
    buffers: &Buffers,
    (dim, width): (usize, usize),
    sub_tile: SubTile,
) {
    let SubTile { lanes, first_key, keys, masked } = sub_tile;
    let lanes = lanes.start..lanes.start + padded(lanes.len());
    let Buffers { scores, probs, sums, state, .. } = *buffers;
    // SAFETY: lanes and keys are within the tile, and the tile within the buffers.
    unsafe {
        Product {
            m: keys,
            n: lanes.len(),
            k: dim,
            a: buffers.keys.add(first_key * dim),
            a_stride: dim,
            b: buffers.transposed.add(lanes.start),
            b_stride: width,
            c: scores.add(lanes.start),
            c_stride: width,
            accumulate: false,
        }
        .run();
        let factor = group.shape.scale * LOG2_E;
        let mask = Mask { last_key: state.last_key, first_key, masked };
        dispatch(
            LEVEL,
            OnlineSoftmax { keys, lanes: lanes.clone(), width, scores, factor, mask, state, probs },
        );
        if first_key > 0 {
            dispatch(LEVEL, Rescale { dim, lanes: lanes.clone(), width, sums, by: state.rescale });
        }
        Product {
            m: dim,
            n: lanes.len(),
            k: keys,
            a: buffers.transposed_values.add(first_key * dim),
            a_stride: KEYS,
            b: probs.add(lanes.start),
            b_stride: width,
            c: sums.add(lanes.start),
            c_stride: width,
            accumulate: first_key > 0,
        }
        .run();
    }
}
