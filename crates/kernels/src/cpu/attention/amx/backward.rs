//! The backward pass on AMX.

use super::pack::{self, padded};
use super::product::{Product, TILE};
use super::softmax::SoftmaxBackward;
use crate::Float;
use crate::cpu::amx_tiles::TileConfig;
use crate::cpu::attention::Backward;
use crate::cpu::attention::head_group::{HeadGroup, SubTile};
use crate::cpu::attention::partition::{self, BackwardTask, BlockSizes, Worker};
use crate::cpu::attention::query_stats::QueryStats;
use crate::cpu::attention::scratch_arrays;
use crate::cpu::attention::softmax::Mask;
use crate::cpu::attention::store_grads::{StoreKeyGrads, StoreQueryGrads};
use crate::cpu::vector::dispatch;
use crate::cpu::{Level, Scratch};
use std::f32::consts::LOG2_E;
use std::ops::Range;

const QUERIES: usize = 64;
const KEYS: usize = 64;
const BLOCK_SIZES: BlockSizes = BlockSizes { queries: QUERIES, keys: KEYS };
const LEVEL: Level = Level::Amx;

/// Buffers of one head group and one block of queries.
struct Buffers {
    keys: *mut u16,            // (k_len, dim)
    values: *mut u16,          // (k_len, dim)
    transposed_keys: *mut u16, // (tiles, dim, KEYS)
    dkeys: *mut f32,           // (k_len, dim)
    dvalues: *mut f32,         // (k_len, dim)
    queries: Layouts,
    douts: Layouts,
    transposed_dqueries: *mut f32, // (dim, rows)
    dqueries: *mut f32,            // (rows, dim)
    scores: *mut f32,              // (KEYS, rows)
    dprobs: *mut f32,              // (KEYS, rows)
    probs: *mut u16,               // (KEYS, rows)
    dscores: *mut u16,             // (KEYS, rows)
    dscore_pairs: *mut u32,        // (KEYS / 2, rows)
    last_key: *mut f32,            // (rows)
    lse: *mut f32,                 // (rows)
    delta: *mut f32,               // (rows)
}

/// A block of queries, or of gradients of the output, in the layouts that products need.
#[derive(Clone, Copy)]
struct Layouts {
    row_major: *mut u16,  // (rows, dim)
    transposed: *mut u32, // (dim / 2, rows)
    pairs: *mut u32,      // (rows / 2, dim)
}

/// Computes the tiles of one worker.
///
/// # Safety
/// The level is `Amx`, and E is bf16.
pub(in crate::cpu::attention) unsafe fn run_worker<E: Float, G: Float>(
    job: &Backward<'_, E, G>,
    scratch: &Scratch,
    worker: Worker,
) {
    let shape = job.shape;
    let dim = padded(shape.head_dim);
    // Sizes count f32; two bf16 take one.
    let (u, b) = (shape.k_len.next_multiple_of(KEYS) * dim, QUERIES * dim);
    let (h, t) = (b / 2, KEYS * QUERIES);
    let group = [u / 2, u / 2, u / 2, u, u];
    let block = [h, h, h, h, h, h, b, b, QUERIES, QUERIES, QUERIES];
    let tile = [t, t, t / 2, t / 2, t / 2];
    scratch_arrays::with(
        scratch,
        [group.iter().sum(), block.iter().sum(), tile.iter().sum()],
        |[of_unit, of_block, of_tile]| {
            let [keys, values, transposed_keys, dkeys, dvalues] =
                scratch_arrays::split(of_unit, group);
            let [q, qt, qp, d, dt, dp, transposed_dqueries, dqueries, last_key, lse, delta] =
                scratch_arrays::split(of_block, block);
            let [scores, dprobs, probs, dscores, dscore_pairs] =
                scratch_arrays::split(of_tile, tile);
            let buffers = Buffers {
                keys: keys.cast(),
                values: values.cast(),
                transposed_keys: transposed_keys.cast(),
                dkeys,
                dvalues,
                queries: Layouts { row_major: q.cast(), transposed: qt.cast(), pairs: qp.cast() },
                douts: Layouts { row_major: d.cast(), transposed: dt.cast(), pairs: dp.cast() },
                transposed_dqueries,
                dqueries,
                scores,
                dprobs,
                probs: probs.cast(),
                dscores: dscores.cast(),
                dscore_pairs: dscore_pairs.cast(),
                last_key,
                lse,
                delta,
            };
            // SAFETY: the level is Amx.
            let _tiles = unsafe { TileConfig::load() };
            partition::backward(shape, BLOCK_SIZES, worker, |group, task| {
                // SAFETY: the buffers can hold any head group, and no other thread writes the same results.
                unsafe { head_group(job, group, &buffers, task) };
            });
        },
    );
}

unsafe fn head_group<E: Float, G: Float>(
    job: &Backward<'_, E, G>,
    group: &HeadGroup<'_>,
    buffers: &Buffers,
    task: BackwardTask,
) {
    let (k_len, head_dim) = (group.shape.k_len, group.shape.head_dim);
    let dim = padded(head_dim);
    let keys = (task.tiles.start * KEYS).min(k_len)..(task.tiles.end * KEYS).min(k_len);
    let tokens = group.batch * k_len + keys.start..group.batch * k_len + keys.end;
    let (column, at) = (group.kv_head * head_dim, keys.start * dim);
    // SAFETY: all rows are within the checked range, and the buffers can hold them.
    unsafe {
        // The buffer of dq is still free, and large enough for a tile of keys in pairs.
        const { assert!(KEYS / 2 <= QUERIES) };
        let transposed = Some((buffers.transposed_keys.add(at), buffers.dqueries.cast()));
        let (from, row_major) = (job.k.as_bits(), buffers.keys.add(at));
        dispatch(
            LEVEL,
            pack::PackKeys {
                from,
                tokens: tokens.clone(),
                column,
                dim: head_dim,
                tile: KEYS,
                row_major,
                transposed,
            },
        );
        let (from, row_major) = (job.v.as_bits(), buffers.values.add(at));
        let transposed = None;
        dispatch(
            LEVEL,
            pack::PackKeys {
                from,
                tokens: tokens.clone(),
                column,
                dim: head_dim,
                tile: KEYS,
                row_major,
                transposed,
            },
        );
        if task.dkv {
            let whole = keys.len().next_multiple_of(KEYS) * dim;
            buffers.dkeys.add(at).write_bytes(0, whole);
            buffers.dvalues.add(at).write_bytes(0, whole);
        }
        for block in task.blocks.clone() {
            query_block(job, group, group.block(QUERIES, block), buffers, &task);
        }
        if task.dkv {
            let factors = [group.shape.scale, 1.0];
            for (from, to, factor) in
                [(buffers.dkeys, job.dk, factors[0]), (buffers.dvalues, job.dv, factors[1])]
            {
                let tokens = tokens.clone();
                dispatch(
                    LEVEL,
                    StoreKeyGrads {
                        from: from.add(at),
                        row_stride: dim,
                        to,
                        tokens,
                        column,
                        dim: head_dim,
                        factor,
                        accumulate: job.accumulate,
                    },
                );
            }
        }
    }
}

unsafe fn query_block<E: Float, G: Float>(
    job: &Backward<'_, E, G>,
    group: &HeadGroup<'_>,
    rows: Range<usize>,
    buffers: &Buffers,
    task: &BackwardTask,
) {
    let head_dim = group.shape.head_dim;
    let (dim, width) = (padded(head_dim), padded(rows.len()));
    let visible = group.visible_keys(rows.end - 1);
    if !task.dq && visible <= task.tiles.start * KEYS {
        return;
    }
    // SAFETY: the buffers can hold any block; all reads and writes are within the checked range.
    unsafe {
        for (from, layouts) in [(job.q, buffers.queries), (job.dout, buffers.douts)] {
            let Layouts { row_major, transposed, pairs } = layouts;
            let (from, pairs) = (from.as_bits(), Some(pairs));
            dispatch(
                LEVEL,
                pack::PackQueries {
                    group: *group,
                    from,
                    rows: rows.clone(),
                    row_major,
                    transposed,
                    pairs,
                },
            );
        }
        let Buffers { last_key, lse, delta, .. } = *buffers;
        dispatch(
            LEVEL,
            QueryStats { job, group: *group, rows: rows.clone(), width, last_key, lse, delta },
        );
        if task.dq {
            buffers.transposed_dqueries.write_bytes(0, width * dim);
        }
        for first_key in
            task.tiles.clone().map(|tile| tile * KEYS).take_while(|first| *first < visible)
        {
            let tile = first_key..(first_key + KEYS).min(visible);
            for sub_tile in group.sub_tiles(&rows, tile, TILE) {
                let lanes =
                    sub_tile.lanes.start..sub_tile.lanes.start + padded(sub_tile.lanes.len());
                Tile { group, buffers, sub_tile, lanes, dim, width }.run(task);
            }
        }
        if task.dq {
            let (from, to) = (buffers.transposed_dqueries, buffers.dqueries);
            dispatch(LEVEL, pack::TransposeBack { dim: head_dim, rows: rows.len(), from, to });
            let (from, to, factor) = (buffers.dqueries, job.dq, group.shape.scale);
            let accumulate = job.accumulate;
            dispatch(
                LEVEL,
                StoreQueryGrads {
                    from,
                    row_stride: dim,
                    to,
                    group: *group,
                    rows,
                    factor,
                    accumulate,
                },
            );
        }
    }
}

/// Some queries of a block with some keys of a tile.
struct Tile<'a> {
    group: &'a HeadGroup<'a>,
    buffers: &'a Buffers,
    sub_tile: SubTile,
    /// The lanes of the sub-tile, padded.
    lanes: Range<usize>,
    dim: usize,
    width: usize,
}

impl Tile<'_> {
    unsafe fn run(&self, task: &BackwardTask) {
        let Tile { group, buffers, ref lanes, dim, width, .. } = *self;
        let SubTile { first_key, keys, masked, .. } = self.sub_tile;
        let Buffers { scores, dprobs, probs, dscores, dscore_pairs, last_key, lse, delta, .. } =
            *buffers;
        let at = first_key * dim;
        // SAFETY: lanes and keys are within the tile, and the tile within the buffers.
        unsafe {
            self.scores(buffers.keys.add(at), buffers.queries.transposed, scores);
            self.scores(buffers.values.add(at), buffers.douts.transposed, dprobs);
            let factor = group.shape.scale * LOG2_E;
            let mask = Mask { last_key, first_key, masked };
            dispatch(
                LEVEL,
                SoftmaxBackward {
                    keys,
                    lanes: lanes.clone(),
                    width,
                    scores,
                    factor,
                    dprobs,
                    mask,
                    lse,
                    delta,
                    probs,
                    dscores,
                    dscore_pairs,
                },
            );
            if task.dkv {
                self.to_keys(probs, buffers.douts.pairs, buffers.dvalues.add(at));
                self.to_keys(dscores, buffers.queries.pairs, buffers.dkeys.add(at));
            }
            if task.dq {
                Product {
                    m: dim,
                    n: lanes.len(),
                    k: keys,
                    a: buffers.transposed_keys.add(at),
                    a_stride: KEYS,
                    b: dscore_pairs.add(lanes.start),
                    b_stride: width,
                    c: buffers.transposed_dqueries.add(lanes.start),
                    c_stride: width,
                    accumulate: true,
                }
                .run();
            }
        }
    }

    /// (keys, dim) · (dim, lanes) → (keys, lanes)
    unsafe fn scores(&self, a: *const u16, transposed: *const u32, to: *mut f32) {
        let Tile { ref lanes, dim, width, .. } = *self;
        let keys = self.sub_tile.keys;
        let (b, c) = (transposed.wrapping_add(lanes.start), to.wrapping_add(lanes.start));
        // SAFETY: the buffers have the shapes given at their declaration.
        unsafe {
            Product {
                m: keys,
                n: lanes.len(),
                k: dim,
                a,
                a_stride: dim,
                b,
                b_stride: width,
                c,
                c_stride: width,
                accumulate: false,
            }
            .run()
        }
    }

    /// (keys, lanes) · (lanes, dim) added to (keys, dim)
    unsafe fn to_keys(&self, tile: *const u16, pairs: *const u32, c: *mut f32) {
        let Tile { ref lanes, dim, width, .. } = *self;
        let keys = self.sub_tile.keys;
        let (a, b) = (tile.wrapping_add(lanes.start), pairs.wrapping_add(lanes.start / 2 * dim));
        // SAFETY: the buffers have the shapes given at their declaration.
        unsafe {
            Product {
                m: keys,
                n: dim,
                k: lanes.len(),
                a,
                a_stride: width,
                b,
                b_stride: dim,
                c,
                c_stride: dim,
                accumulate: true,
            }
            .run()
        }
    }
}
