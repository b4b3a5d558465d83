//! The backward pass in f32: every tile of probabilities is recomputed from the log-sum-exp and used immediately. Sums
//! are taken in a fixed order, key tiles and query blocks ascending, on any thread.

use super::Backward;
use super::head_group::{HeadGroup, SubTile};
use super::pack::{self, padded};
use super::partition::{self, BackwardTask, BlockSizes, Worker};
use super::product::{Init, Product};
use super::query_stats::QueryStats;
use super::scratch_arrays;
use super::softmax::{Mask, SoftmaxBackward};
use super::store_grads::{StoreKeyGrads, StoreQueryGrads};
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
    keys: *mut f32,               // (k_len, dim)
    values: *mut f32,             // (k_len, dim)
    dkeys: *mut f32,              // (k_len, dim)
    dvalues: *mut f32,            // (k_len, dim)
    queries: *mut f32,            // (rows, dim)
    transposed_queries: *mut f32, // (dim, rows)
    douts: *mut f32,              // (rows, dim)
    transposed_douts: *mut f32,   // (dim, rows)
    dqueries: *mut f32,           // (rows, dim)
    scores: *mut f32,             // (keys, rows)
    dprobs: *mut f32,             // (keys, rows)
    last_key: *mut f32,           // (rows)
    lse: *mut f32,                // (rows)
    delta: *mut f32,              // (rows)
}

/// Computes the tiles of one worker.
pub(super) fn run_worker<E: Float, G: Float>(
    job: &Backward<'_, E, G>,
    level: Level,
    scratch: &Scratch,
    worker: Worker,
) {
    let shape = job.shape;
    let dim = padded(shape.head_dim);
    let (u, b, t) = (shape.k_len * dim, QUERIES * dim, KEYS * QUERIES);
    let lens = [u, u, u, u, b, b, b, b, b, t, t, QUERIES, QUERIES, QUERIES];
    scratch_arrays::with(scratch, lens, |arrays| {
        let [
            keys,
            values,
            dkeys,
            dvalues,
            queries,
            transposed_queries,
            douts,
            transposed_douts,
            ..,
        ] = arrays;
        let [.., dqueries, scores, dprobs, last_key, lse, delta] = arrays;
        let buffers = Buffers {
            keys,
            values,
            dkeys,
            dvalues,
            queries,
            transposed_queries,
            douts,
            transposed_douts,
            dqueries,
            scores,
            dprobs,
            last_key,
            lse,
            delta,
        };
        partition::backward(shape, BLOCK_SIZES, worker, |group, task| {
            let pass = Pass { job, level, group, buffers: &buffers, task };
            // SAFETY: the buffers can hold any head group, and no other thread writes the same results.
            unsafe { pass.run() };
        });
    });
}

/// One task of a backward pass.
struct Pass<'a, E, G> {
    job: &'a Backward<'a, E, G>,
    level: Level,
    group: &'a HeadGroup<'a>,
    buffers: &'a Buffers,
    task: BackwardTask,
}

impl<E: Float, G: Float> Pass<'_, E, G> {
    unsafe fn run(&self) {
        let Pass { job, level, group, buffers, ref task } = *self;
        let (k_len, head_dim) = (group.shape.k_len, group.shape.head_dim);
        let dim = padded(head_dim);
        let keys = (task.tiles.start * KEYS).min(k_len)..(task.tiles.end * KEYS).min(k_len);
        let tokens = group.batch * k_len + keys.start..group.batch * k_len + keys.end;
        let (column, start) = (group.kv_head * head_dim, keys.start * dim);
        // SAFETY: all rows are within the checked range, and the buffers can hold them.
        unsafe {
            for (from, to) in [(job.k, buffers.keys), (job.v, buffers.values)] {
                let (tokens, to) = (tokens.clone(), to.add(start));
                dispatch(level, pack::PackKeys { from, tokens, column, dim: head_dim, to });
            }
            if task.dkv {
                buffers.dkeys.add(start).write_bytes(0, keys.len() * dim);
                buffers.dvalues.add(start).write_bytes(0, keys.len() * dim);
            }
            for block in task.blocks.clone() {
                self.query_block(group.block(QUERIES, block));
            }
            if task.dkv {
                let scale = group.shape.scale;
                for (from, to, factor) in
                    [(buffers.dkeys, job.dk, scale), (buffers.dvalues, job.dv, 1.0)]
                {
                    let store = StoreKeyGrads {
                        row_stride: dim,
                        from: from.add(start),
                        to,
                        tokens: tokens.clone(),
                        column,
                        dim: head_dim,
                        factor,
                        accumulate: job.accumulate,
                    };
                    dispatch(level, store);
                }
            }
        }
    }

    unsafe fn query_block(&self, rows: Range<usize>) {
        let Pass { job, level, group, buffers, ref task } = *self;
        let head_dim = group.shape.head_dim;
        let (dim, width) = (padded(head_dim), padded(rows.len()));
        let visible = group.visible_keys(rows.end - 1);
        if !task.dq && visible <= task.tiles.start * KEYS {
            return;
        }
        // SAFETY: the buffers can hold any block; all reads and writes are within the checked range.
        unsafe {
            for (from, row_major, transposed, factor) in [
                (job.q, buffers.queries, buffers.transposed_queries, group.shape.scale * LOG2_E),
                (job.dout, buffers.douts, buffers.transposed_douts, 1.0),
            ] {
                let (group, rows) = (*group, rows.clone());
                let pack = pack::PackQueries { group, from, rows, row_major, transposed, factor };
                dispatch(level, pack);
            }
            let Buffers { last_key, lse, delta, .. } = *buffers;
            let rows_of_block = rows.clone();
            let stats =
                QueryStats { job, group: *group, rows: rows_of_block, width, last_key, lse, delta };
            dispatch(level, stats);
            if task.dq {
                buffers.dqueries.write_bytes(0, rows.len() * dim);
            }
            for first_key in
                task.tiles.clone().map(|tile| tile * KEYS).take_while(|first| *first < visible)
            {
                let tile = first_key..(first_key + KEYS).min(visible);
                for sub_tile in group.sub_tiles(&rows, tile, 1) {
                    Tile { level, buffers, sub_tile, width, head_dim, dim }.run(task);
                }
            }
            if task.dq {
                let store = StoreQueryGrads {
                    row_stride: dim,
                    from: buffers.dqueries,
                    to: job.dq,
                    group: *group,
                    rows,
                    factor: group.shape.scale,
                    accumulate: job.accumulate,
                };
                dispatch(level, store);
            }
        }
    }
}

/// Some queries of a block with some keys of a tile.
struct Tile<'a> {
    level: Level,
    buffers: &'a Buffers,
    sub_tile: SubTile,
    width: usize,
    head_dim: usize,
    dim: usize,
}

impl Tile<'_> {
    unsafe fn run(&self, task: &BackwardTask) {
        let SubTile { ref lanes, first_key, keys, masked } = self.sub_tile;
        let Buffers { scores, dprobs, last_key, lse, delta, .. } = *self.buffers;
        let (at, lanes) = (first_key * self.dim, lanes.start..lanes.start + padded(lanes.len()));
        let (buffers, width) = (self.buffers, self.width);
        // SAFETY: lanes and keys are within the tile, and the tile within the buffers.
        unsafe {
            self.scores(buffers.keys.add(at), buffers.transposed_queries, scores);
            self.scores(buffers.values.add(at), buffers.transposed_douts, dprobs);
            let mask = Mask { last_key, first_key, masked };
            dispatch(
                self.level,
                SoftmaxBackward { keys, lanes, width, scores, dprobs, mask, lse, delta },
            );
            if task.dkv {
                self.to_keys(scores, buffers.douts, buffers.dvalues.add(at));
                self.to_keys(dprobs, buffers.queries, buffers.dkeys.add(at));
            }
            if task.dq {
                self.to_queries(dprobs, buffers.keys.add(at), buffers.dqueries);
            }
        }
    }

    /// (keys, dim) · (dim, lanes) → (keys, lanes)
    unsafe fn scores(&self, keys: *const f32, transposed: *const f32, to: *mut f32) {
        let lanes = &self.sub_tile.lanes;
        let product = Product {
            m: self.sub_tile.keys,
            n: padded(lanes.len()),
            k: self.head_dim,
            a: keys,
            a_strides: (self.dim, 1),
            b: transposed.wrapping_add(lanes.start),
            b_stride: self.width,
            c: to.wrapping_add(lanes.start),
            c_stride: self.width,
            init: Init::Zero,
        };
        // SAFETY: the buffers have the shapes given at their declaration.
        unsafe { dispatch(self.level, product) }
    }

    /// (keys, lanes) · (lanes, dim) added to (keys, dim)
    unsafe fn to_keys(&self, tile: *const f32, row_major: *const f32, to: *mut f32) {
        let lanes = &self.sub_tile.lanes;
        let product = Product {
            m: self.sub_tile.keys,
            n: self.dim,
            k: lanes.len(),
            a: tile.wrapping_add(lanes.start),
            a_strides: (self.width, 1),
            b: row_major.wrapping_add(lanes.start * self.dim),
            b_stride: self.dim,
            c: to,
            c_stride: self.dim,
            init: Init::Accumulate,
        };
        // SAFETY: the buffers have the shapes given at their declaration.
        unsafe { dispatch(self.level, product) }
    }

    /// (keys, lanes) transposed · (keys, dim) added to (lanes, dim)
    unsafe fn to_queries(&self, tile: *const f32, keys: *const f32, to: *mut f32) {
        let lanes = &self.sub_tile.lanes;
        let product = Product {
            m: lanes.len(),
            n: self.dim,
            k: self.sub_tile.keys,
            a: tile.wrapping_add(lanes.start),
            a_strides: (1, self.width),
            b: keys,
            b_stride: self.dim,
            c: to.wrapping_add(lanes.start * self.dim),
            c_stride: self.dim,
            init: Init::Accumulate,
        };
        // SAFETY: the buffers have the shapes given at their declaration.
        unsafe { dispatch(self.level, product) }
    }
}
