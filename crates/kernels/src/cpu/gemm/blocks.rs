//! The f32 multiply in blocks: which panels are packed when, and stay in which cache. The arithmetic itself
//! is a `Kernel`'s.

use super::epilogue::Tile;
use super::grid::Grid;
use super::{Operand, Product, pack, portable};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512, lanes};
use crate::cpu::{Cpu, Level};
use std::ops::Range;

/// The inner loop of one instruction set, and how it wants its panels.
pub struct Kernel {
    pub level: Level,
    /// Rows of `a` in a panel, at most: any smaller number will do as well.
    pub rows: usize,
    /// Columns of `b` in a panel, always: the last one is filled up with zeros.
    pub cols: usize,
    pub multiply: Multiply,
    pub pack: Pack,
}

/// `sums` (rows, cols) of the panels `a` (k, rows) and `b` (k, cols), on top of what is there or of nothing.
pub type Multiply =
    unsafe fn(rows: usize, k: usize, a: *const f32, b: *const f32, sums: *mut f32, resume: bool);

/// Packs lanes of an operand into a panel.
pub type Pack = unsafe fn(strip: &Strip<'_>, panel: *mut f32);

/// What to pack: `panel[k][lane]` for k in `ks`, `width` lanes beginning with `lane`; those from `lanes` on
/// are zero. A pack may write up to sixteen elements past the panel's end.
pub struct Strip<'a> {
    pub from: Operand<'a>,
    pub lane: usize,
    pub lanes: usize,
    pub width: usize,
    pub ks: Range<usize>,
}

impl Kernel {
    pub fn of(level: Level) -> Kernel {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Amx => {
                Kernel { level, rows: 14, cols: 32, multiply: avx512::multiply, pack: lanes::pack }
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                Kernel { level, rows: 6, cols: 16, multiply: avx2::multiply, pack: pack::avx2 }
            }
            _ => {
                Kernel { level, rows: 4, cols: 8, multiply: portable::multiply, pack: pack::plain }
            }
        }
    }
}

/// Of the packed chunk of `b`, which stays in L2 while all of `a` passes by.
const CHUNK: usize = 768 << 10;
/// The longest panel: 14 rows of it are 56 KiB, and a panel of `b` 128 KiB.
const LONG: usize = 1024;
/// Elements of `a` that are kept packed for the next chunks of `b`: 4 MiB, a share of L3.
const KEPT: usize = 1 << 20;
/// When k is cut, sums wait in scratch: for so many elements of output at a time.
const WAITING: usize = 1 << 20;
/// What a pack may write past its panel.
const SLACK: usize = 16;

pub fn run(cpu: &Cpu, kernel: &Kernel, product: &Product<'_>) {
    let grain = (1, kernel.cols);
    let grid = Grid::of(cpu.team.size(), product.m, product.n, grain);
    cpu.team.run(&|member, _| {
        let (rows, cols) = grid.share(member, product.m, product.n, grain);
        if rows.is_empty() || cols.is_empty() {
            return;
        }
        let blocks = Blocks::of(kernel, product.k, rows.len(), cols.len());
        cpu.scratch[member].with(blocks.bytes(kernel), |scratch| {
            for row in rows.clone().step_by(blocks.rows) {
                for col in cols.clone().step_by(blocks.cols) {
                    let rows = row..(row + blocks.rows).min(rows.end);
                    let cols = col..(col + blocks.cols).min(cols.end);
                    // SAFETY: the rectangle is this member's alone, the scratch has the blocks' size, and the
                    // kernel is of a level that this processor has.
                    unsafe { rectangle(kernel, product, &blocks, rows, cols, scratch.cast()) };
                }
            }
        });
    });
}

/// How a member's rectangle is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Blocks {
    /// Of k, as even as can be.
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
    fn of(kernel: &Kernel, k: usize, m: usize, n: usize) -> Blocks {
        let pieces = k.div_ceil(LONG).max(1);
        let long = k.div_ceil(pieces).max(1);
        let chunk = (CHUNK / 4 / long / kernel.cols).max(1) * kernel.cols;
        let once = n <= chunk;
        let mut rows = if once { m } else { m.min((KEPT / long).max(kernel.rows)) };
        let mut cols = n;
        if pieces > 1 {
            rows = rows.min(1024);
            cols = n.min((WAITING / rows / kernel.cols).max(1) * kernel.cols);
        }
        Blocks {
            long,
            rows,
            cols,
            chunk: chunk.min(n.next_multiple_of(kernel.cols)),
            once,
            cut: pieces > 1,
        }
    }

    fn panels_of_a(&self, kernel: &Kernel) -> usize {
        if self.once { kernel.rows * self.long } else { self.rows * self.long }
    }

    fn slots(&self, kernel: &Kernel) -> usize {
        let tile = kernel.rows * kernel.cols;
        if self.cut {
            tile * self.rows.div_ceil(kernel.rows) * self.cols.div_ceil(kernel.cols)
        } else {
            tile
        }
    }

    fn bytes(&self, kernel: &Kernel) -> usize {
        let b = self.chunk * self.long;
        4 * (self.slots(kernel) + round(b + SLACK) + round(self.panels_of_a(kernel) + SLACK))
    }
}

/// To whole cache lines.
fn round(elements: usize) -> usize {
    elements.next_multiple_of(16)
}

/// One block of the output, over all of k.
///
/// # Safety
/// The rectangle lies within the product, is this thread's alone, and `scratch` has the bytes of `blocks`.
unsafe fn rectangle(
    kernel: &Kernel,
    product: &Product<'_>,
    blocks: &Blocks,
    rows: Range<usize>,
    cols: Range<usize>,
    scratch: *mut f32,
) {
    let k = product.k;
    let heights = rows.len().div_ceil(kernel.rows);
    // Panels of nearly equal height: 128 rows are 8 panels of 13 and 2 of 12, none is a sliver.
    let height = |panel: usize| rows.start + rows.len() * panel / heights;
    // SAFETY: offsets stay inside the bytes that `blocks` counted; the rest is the caller's promise.
    unsafe {
        let slots = scratch;
        let packed_b = slots.add(blocks.slots(kernel));
        let packed_a = packed_b.add(round(blocks.chunk * blocks.long + SLACK));
        let mut from = 0;
        loop {
            let to = (from + blocks.long).min(k);
            let ks = from..to;
            for chunk in cols.clone().step_by(blocks.chunk) {
                let end = (chunk + blocks.chunk).min(cols.end);
                for panel in 0..heights {
                    let (row, next) = (height(panel), height(panel + 1));
                    let a = if blocks.once {
                        packed_a
                    } else {
                        packed_a.add((row - rows.start) * ks.len())
                    };
                    if chunk == cols.start {
                        let strip = Strip {
                            from: product.a,
                            lane: row,
                            lanes: next - row,
                            width: next - row,
                            ks: ks.clone(),
                        };
                        (kernel.pack)(&strip, a);
                    }
                    for col in (chunk..end).step_by(kernel.cols) {
                        let width = (end - col).min(kernel.cols);
                        let b = packed_b.add((col - chunk) * ks.len());
                        if panel == 0 {
                            let strip = Strip {
                                from: product.b,
                                lane: col,
                                lanes: width,
                                width: kernel.cols,
                                ks: ks.clone(),
                            };
                            (kernel.pack)(&strip, b);
                        }
                        let slot = match blocks.cut {
                            true => (col - cols.start) / kernel.cols * heights + panel,
                            false => 0,
                        };
                        let sums = slots.add(slot * kernel.rows * kernel.cols);
                        (kernel.multiply)(next - row, ks.len(), a, b, sums, from > 0);
                        if to == k {
                            let tile = Tile {
                                sums,
                                stride: kernel.cols,
                                row,
                                col,
                                rows: next - row,
                                cols: width,
                            };
                            product.target.finish(kernel.level, tile);
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
