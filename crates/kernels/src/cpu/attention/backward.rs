//! The backward pass in f32: every tile of probabilities is computed again from the log-sum-exp and used up at
//! once. Sums are taken in one order, key tiles and query blocks ascending, whoever takes them.

use super::Backward;
use super::pack::{self, padded};
use super::product::{Product, Start};
use super::room;
use super::rows::Reach;
use super::softmax::{Gradient, Mask};
use super::unit::{Deal, KEYS, QUERIES, Unit};
use crate::Float;
use crate::cpu::vector::{Job, Vector, run};
use crate::cpu::{Level, Scratch};
use std::f32::consts::LOG2_E;
use std::ops::Range;

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

/// What a pass over a unit's tiles is for.
#[derive(Clone, PartialEq)]
struct Want {
    /// Blocks of queries to visit.
    blocks: Range<usize>,
    /// Tiles of keys to visit.
    tiles: Range<usize>,
    /// Whether to write dq, for which all tiles must be visited.
    dq: bool,
    /// Whether to write dk and dv of these tiles, for which all blocks must be visited.
    dkv: bool,
}

/// A member's share. Units are dealt out whole as long as everybody gets as many. What remains is cut: each
/// member takes tiles of keys for dk and dv, and then blocks of queries for dq. That computes the tiles
/// twice, seven products instead of five, and gives the same bits.
pub(super) fn member<E: Float>(
    job: &Backward<'_, E>,
    level: Level,
    scratch: &Scratch,
    member: usize,
    size: usize,
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
        let each = job.units() / size;
        let whole = Unit::nth(shape, 0);
        let (blocks, tiles) = (0..whole.blocks(), 0..shape.k_len.div_ceil(KEYS));
        for number in member * each..(member + 1) * each {
            let want = Want { blocks: blocks.clone(), tiles: tiles.clone(), dq: true, dkv: true };
            // SAFETY: the arrays have room for any unit, and this one is nobody else's.
            unsafe { one_unit(job, level, &Unit::nth(shape, number), &arrays, want) };
        }
        let rest = each * size..job.units();
        let cost = |unit: &Unit<'_>, tile: usize| unit.rows() - unit.first_to_see(tile * KEYS) + 16;
        let total = tiles.clone().map(|tile| cost(&whole, tile)).sum::<usize>() * rest.len();
        let mut deal = Deal::new(total, member, size);
        for number in rest.clone() {
            let unit = Unit::nth(shape, number);
            let mine = run_of(tiles.clone().filter(|tile| deal.next(cost(&unit, *tile))));
            let want = Want { blocks: blocks.clone(), tiles: mine, dq: false, dkv: true };
            // SAFETY: as above; the rows of dk and dv in these tiles are nobody else's.
            unsafe { one_unit(job, level, &unit, &arrays, want) };
        }
        let cost = |unit: &Unit<'_>, block: usize| unit.seen(unit.block(block).end - 1) + 16;
        let total = blocks.clone().map(|block| cost(&whole, block)).sum::<usize>() * rest.len();
        let mut deal = Deal::new(total, member, size);
        for number in rest {
            let unit = Unit::nth(shape, number);
            let mine = run_of(blocks.clone().filter(|block| deal.next(cost(&unit, *block))));
            let want = Want { blocks: mine, tiles: tiles.clone(), dq: true, dkv: false };
            // SAFETY: as above; the rows of dq in these blocks are nobody else's.
            unsafe { one_unit(job, level, &unit, &arrays, want) };
        }
    });
}

/// From the first to the last of numbers that follow each other.
fn run_of(numbers: impl Iterator<Item = usize>) -> Range<usize> {
    numbers.fold(
        0..0,
        |run, number| if run.is_empty() { number..number + 1 } else { run.start..number + 1 },
    )
}

unsafe fn one_unit<E: Float>(
    job: &Backward<'_, E>,
    level: Level,
    unit: &Unit<'_>,
    arrays: &Arrays,
    want: Want,
) {
    if want.blocks.is_empty() && want.tiles.is_empty() {
        return;
    }
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
            one_block(job, level, unit, unit.block(block), arrays, &want);
        }
        if want.dkv {
            let scale = unit.shape.scale;
            for (from, to, factor) in [(arrays.dkeys, job.dk, scale), (arrays.dvalues, job.dv, 1.0)]
            {
                run(
                    level,
                    Write {
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
        run(level, Deltas { job, unit: *unit, rows: rows.clone(), arrays });
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

/// A block's D = sum of dout out, its log-sum-exp in powers of two, and what its rows see.
struct Deltas<'a, E> {
    job: &'a Backward<'a, E>,
    unit: Unit<'a>,
    rows: Range<usize>,
    arrays: &'a Arrays,
}

impl<E: Float> Job for Deltas<'_, E> {
    /// # Safety
    /// The block's `douts` are packed, and its rows inside what was checked.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        let head_dim = self.unit.shape.head_dim;
        for lane in 0..padded(self.rows.len()) {
            let row = self.rows.start + lane;
            // SAFETY: as above.
            unsafe {
                let (mut last, mut lse, mut delta) = (-1.0, f32::INFINITY, 0.0);
                if row < self.rows.end {
                    let place = self.unit.place(row);
                    let out = self.job.out.at(place.token, place.column);
                    let dout = self.arrays.douts.add(lane * padded(head_dim));
                    let mut sums = [0.0; 16];
                    for i in 0..head_dim {
                        sums[i % 16] += *dout.add(i) * (*out.add(i)).wide();
                    }
                    delta = sums.iter().sum();
                    last = self.unit.seen(row) as f32 - 1.0;
                    let kept = *self.job.lse.at(0, place.lse) * LOG2_E;
                    lse = if kept == f32::NEG_INFINITY { f32::INFINITY } else { kept };
                }
                *self.arrays.last.add(lane) = last;
                *self.arrays.lse.add(lane) = lse;
                *self.arrays.delta.add(lane) = delta;
            }
        }
    }
}

/// Rows of keys' gradients to where they belong.
struct Write<E> {
    from: *const f32,
    to: Reach<E>,
    tokens: Range<usize>,
    column: usize,
    dim: usize,
    factor: f32,
}

impl<E: Float> Job for Write<E> {
    /// # Safety
    /// The rows are inside what `to` was checked for, and this member's.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        for (i, token) in self.tokens.enumerate() {
            let (from, to) =
                (self.from.wrapping_add(i * padded(self.dim)), self.to.at(token, self.column));
            // SAFETY: as above.
            unsafe { pack::narrow(from, self.dim, self.factor, to) };
        }
    }
}

/// Rows of queries' gradients to where they belong.
struct WriteQueries<'a, E> {
    from: *const f32,
    to: Reach<E>,
    unit: Unit<'a>,
    rows: Range<usize>,
    factor: f32,
}

impl<E: Float> Job for WriteQueries<'_, E> {
    /// # Safety
    /// The rows are inside what `to` was checked for, and this member's.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        let dim = self.unit.shape.head_dim;
        for (lane, row) in self.rows.enumerate() {
            let place = self.unit.place(row);
            let (from, to) =
                (self.from.wrapping_add(lane * padded(dim)), self.to.at(place.token, place.column));
            // SAFETY: as above.
            unsafe { pack::narrow(from, dim, self.factor, to) };
        }
    }
}
