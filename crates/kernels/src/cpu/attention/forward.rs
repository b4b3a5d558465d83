//! The forward pass in f32: a block of queries is multiplied with its visible keys tile by tile, with the online
//! softmax in between (FlashAttention-2, Dao 2023). Scores never leave the caches.

use super::Forward;
use super::head_group::{HeadGroup, SubTile};
use super::pack::{self, padded};
use super::partition::{self, BlockSizes, Worker};
use super::product::{Init, Product};
use super::scratch_arrays;
use super::softmax::{Mask, OnlineSoftmax};
use super::softmax_state::{SoftmaxState, StoreOutput};
use crate::Float;
use crate::cpu::vector::dispatch;
use crate::cpu::{Level, Scratch};
use std::f32::consts::LOG2_E;
use std::ops::Range;

const QUERIES: usize = 64;
const KEYS: usize = 64;
const BLOCK_SIZES: BlockSizes = BlockSizes { queries: QUERIES, keys: KEYS };

/// Buffers of one head group and one block of queries.
struct Buffers {
    keys: *mut f32,       // (k_len, dim)
    values: *mut f32,     // (k_len, dim)
    row_major: *mut f32,  // (rows, dim)
    transposed: *mut f32, // (dim, rows)
    scores: *mut f32,     // (keys, rows)
    out: *mut f32,        // (rows, dim)
    state: SoftmaxState,
}

/// Computes the blocks of one worker.
pub(super) fn run_worker<E: Float, O: Float>(
    job: &Forward<'_, E, O>,
    level: Level,
    scratch: &Scratch,
    worker: Worker,
) {
    let shape = job.shape;
    let dim = padded(shape.head_dim);
    let (keys, block, tile) = (shape.k_len * dim, QUERIES * dim, KEYS * QUERIES);
    let lens = [keys, keys, block, block, tile, block, QUERIES, QUERIES, QUERIES, QUERIES];
    scratch_arrays::with(
        scratch,
        lens,
        |[keys, values, row_major, transposed, scores, out, last_key, max, sum, rescale]| {
            let state = SoftmaxState { last_key, max, sum, rescale };
            let buffers = Buffers { keys, values, row_major, transposed, scores, out, state };
            partition::forward(shape, BLOCK_SIZES, worker, |group, block, first_of_group| {
                // SAFETY: the buffers can hold any head group and block, and no other thread writes the
                // block's rows of out and lse.
                unsafe {
                    if first_of_group {
                        pack_keys(job, level, group, &buffers);
                    }
                    query_block(job, level, group, block, &buffers);
                }
            });
        },
    );
}

unsafe fn pack_keys<E: Float, O: Float>(
    job: &Forward<'_, E, O>,
    level: Level,
    group: &HeadGroup<'_>,
    buffers: &Buffers,
) {
    let k_len = group.shape.k_len;
    let dim = group.shape.head_dim;
    for (from, to) in [(job.k, buffers.keys), (job.v, buffers.values)] {
        let tokens = group.batch * k_len..(group.batch + 1) * k_len;
        // SAFETY: k and v were checked for all batches and heads.
        unsafe {
            dispatch(level, pack::PackKeys { from, tokens, column: group.kv_head * dim, dim, to })
        };
    }
}

unsafe fn query_block<E: Float, O: Float>(
    job: &Forward<'_, E, O>,
    level: Level,
    group: &HeadGroup<'_>,
    rows: Range<usize>,
    buffers: &Buffers,
) {
    let head_dim = group.shape.head_dim;
    let (dim, width) = (padded(head_dim), padded(rows.len()));
    let factor = group.shape.scale * LOG2_E;
    // SAFETY: the buffers can hold any block; all reads and writes are within the checked range.
    unsafe {
        let (row_major, transposed) = (buffers.row_major, buffers.transposed);
        dispatch(
            level,
            pack::PackQueries {
                group: *group,
                from: job.q,
                rows: rows.clone(),
                row_major,
                transposed,
                factor,
            },
        );
        let state = buffers.state;
        state.init(group, &rows, width);
        let visible = group.visible_keys(rows.end - 1);
        for first_key in (0..visible).step_by(KEYS) {
            let tile = first_key..(first_key + KEYS).min(visible);
            for sub_tile in group.sub_tiles(&rows, tile, 1) {
                multiply_sub_tile(level, buffers, (head_dim, width), sub_tile);
            }
        }
        dispatch(
            level,
            StoreOutput { job, group: *group, rows, state, sums: buffers.out, row_stride: dim },
        );
    }
}

unsafe fn multiply_sub_tile(
    level: Level,
    buffers: &Buffers,
    (head_dim, width): (usize, usize),
    sub_tile: SubTile,
) {
    let SubTile { lanes, first_key, keys, masked } = sub_tile;
    let (dim, across) = (padded(head_dim), padded(lanes.len()));
    let state = buffers.state;
    // SAFETY: lanes and keys are within the tile, and the tile within the buffers.
    unsafe {
        let scores = Product {
            m: keys,
            n: across,
            k: head_dim,
            a: buffers.keys.add(first_key * dim),
            a_strides: (dim, 1),
            b: buffers.transposed.add(lanes.start),
            b_stride: width,
            c: buffers.scores.add(lanes.start),
            c_stride: width,
            init: Init::Zero,
        };
        dispatch(level, scores);
        let mask = Mask { last_key: state.last_key, first_key, masked };
        let (scores, across) = (buffers.scores, lanes.start..lanes.start + across);
        dispatch(level, OnlineSoftmax { keys, lanes: across, width, scores, mask, state });
        let rescale = Init::Rescale(state.rescale.add(lanes.start));
        let out = Product {
            m: lanes.len(),
            n: dim,
            k: keys,
            a: scores.add(lanes.start),
            a_strides: (1, width),
            b: buffers.values.add(first_key * dim),
            b_stride: dim,
            c: buffers.out.add(lanes.start * dim),
            c_stride: dim,
            init: if first_key == 0 { Init::Zero } else { rescale },
        };
        dispatch(level, out);
    }
}
