//! The bf16 multiply in blocks for AMX: which panels are packed when, and stay in which cache.

use super::amx::{self, BLOCK, Rows};
use super::epilogue::Tile;
use super::grid::Grid;
use super::pairs::{self, DEEP, SIDE, Side, TILE};
use super::{Data, Operand, Product};
use crate::cpu::{Cpu, Level};
use half::bf16;
use std::ops::Range;

/// Bytes of the packed chunk of `b`, which stays in L2 while all of `a` passes by.
const CHUNK: usize = 768 << 10;
/// The longest panel, in elements of k: 32 rows of it are 64 KiB.
const LONG: usize = 1024;
/// Elements of `a` that are kept packed for the next chunks of `b`: 4 MiB, a share of L3.
const KEPT: usize = 2 << 20;
/// When k is cut, sums wait in scratch: for so many elements of output at a time.
const WAITING: usize = 1 << 20;

pub fn run(cpu: &Cpu, product: &Product<'_>) {
    let grain = (BLOCK, BLOCK);
    let grid = Grid::of(cpu.team.size(), product.m, product.n, grain);
    cpu.team.run(&|member, _| {
        let (rows, cols) = grid.share(member, product.m, product.n, grain);
        if rows.is_empty() || cols.is_empty() {
            return;
        }
        let blocks = Blocks::of(product.k, rows.len(), cols.len());
        cpu.scratch[member].with(blocks.bytes(), |scratch| {
            // SAFETY: this is only called at the level of AMX; rectangles are this member's alone, and the
            // scratch has the blocks' size.
            unsafe {
                amx::with_tiles(|| {
                    for row in rows.clone().step_by(blocks.rows) {
                        for col in cols.clone().step_by(blocks.cols) {
                            let rows = row..(row + blocks.rows).min(rows.end);
                            let cols = col..(col + blocks.cols).min(cols.end);
                            rectangle(product, &blocks, rows, cols, scratch);
                        }
                    }
                });
            }
        });
    });
}

/// How a member's rectangle is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Blocks {
    /// Of k, in whole tiles.
    long: usize,
    /// Of the output that is worked on at a time.
    rows: usize,
    cols: usize,
    /// Columns of `b` that are packed at a time.
    chunk: usize,
    /// One chunk holds all columns: panels of `a` need not be kept.
    once: bool,
    /// k is cut: all the block's sums wait in scratch.
    cut: bool,
}

impl Blocks {
    fn of(k: usize, m: usize, n: usize) -> Blocks {
        let pieces = k.div_ceil(LONG).max(1);
        let long = k.div_ceil(pieces).max(1).next_multiple_of(DEEP);
        let chunk = (CHUNK / 2 / long / BLOCK).max(1) * BLOCK;
        let once = n <= chunk;
        let whole = |len: usize, most: usize| {
            len.next_multiple_of(BLOCK).min((most / BLOCK).max(1) * BLOCK)
        };
        let mut rows = if once { whole(m, usize::MAX) } else { whole(m, KEPT / long) };
        let mut cols = whole(n, usize::MAX);
        let cut = long < k;
        if cut {
            rows = rows.min(1024);
            cols = whole(n, WAITING / rows);
        }
        Blocks { long, rows, cols, chunk: chunk.min(cols), once, cut }
    }

    fn slots(&self) -> usize {
        if self.cut { self.rows * self.cols } else { BLOCK * BLOCK }
    }

    fn panels_of_a(&self) -> usize {
        if self.once { BLOCK * self.long } else { self.rows * self.long }
    }

    fn bytes(&self) -> usize {
        4 * self.slots() + 2 * (self.chunk * self.long + self.panels_of_a())
    }
}

/// One block of the output, over all of k.
///
/// # Safety
/// Inside `with_tiles`, on a rectangle of the product that is this thread's alone; `scratch` has the bytes of
/// `blocks`.
unsafe fn rectangle(
    product: &Product<'_>,
    blocks: &Blocks,
    rows: Range<usize>,
    cols: Range<usize>,
    scratch: *mut u8,
) {
    let k = product.k;
    let panels = rows.len().div_ceil(BLOCK);
    // SAFETY: offsets stay inside the bytes that `blocks` counted; the rest is the caller's promise.
    unsafe {
        let slots = scratch.cast::<f32>();
        let packed_b = slots.add(blocks.slots()).cast::<bf16>();
        let packed_a = packed_b.add(blocks.chunk * blocks.long);
        let mut from = 0;
        loop {
            let to = (from + blocks.long).min(k);
            let tiles = (to - from).div_ceil(DEEP);
            for chunk in cols.clone().step_by(blocks.chunk) {
                let end = (chunk + blocks.chunk).min(cols.end);
                for panel in 0..panels {
                    let row = rows.start + panel * BLOCK;
                    let height = (rows.end - row).min(BLOCK);
                    let a = in_place(&product.a, row, height, from, to).unwrap_or_else(|| {
                        let kept = if blocks.once { 0 } else { panel * 2 * TILE * tiles };
                        let a = packed_a.add(kept);
                        if chunk == cols.start {
                            pairs::pack(&product.a, Side::A, row, height, from, to, a);
                        }
                        Rows { upper: a, lower: a.add(TILE), stride: 2 * DEEP, step: 4 * TILE }
                    });
                    for col in (chunk..end).step_by(BLOCK) {
                        let width = (end - col).min(BLOCK);
                        let b = packed_b.add((col - chunk) / BLOCK * 2 * TILE * tiles);
                        if panel == 0 {
                            pairs::pack(&product.b, Side::B, col, width, from, to, b);
                        }
                        let slot = if blocks.cut {
                            (col - cols.start) / BLOCK * panels + panel
                        } else {
                            0
                        };
                        let sums = slots.add(slot * BLOCK * BLOCK);
                        amx::multiply(tiles, a, b, sums, 4 * BLOCK, from > 0);
                        if to == k {
                            let tile =
                                Tile { sums, stride: BLOCK, row, col, rows: height, cols: width };
                            product.target.finish(Level::Amx, tile);
                        }
                    }
                }
            }
            from = to;
            if from == k {
                break;
            }
        }
    }
}

/// Full rows of bf16 that run along k are tiles as they lie.
fn in_place(a: &Operand<'_>, row: usize, height: usize, from: usize, to: usize) -> Option<Rows> {
    let Data::Bf16(values) = a.data else { return None };
    if from == to || !a.k_runs || height < BLOCK || !(to - from).is_multiple_of(DEEP) {
        return None;
    }
    let row_at = |row: usize| values[row * a.stride + from..].as_ptr();
    Some(Rows {
        upper: row_at(row),
        lower: row_at(row + SIDE),
        stride: 2 * a.stride,
        step: 2 * DEEP,
    })
}
