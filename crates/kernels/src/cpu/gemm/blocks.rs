//! The multiply in blocks: which panels are packed when, and stay in which cache. The arithmetic itself is a
//! `Kernel`'s.

use super::epilogue::Tile;
use super::grid::Rectangle;
use super::kernel::{Ahead, Kernel, Lying, Rows, Strip, Sums};
use super::{Data, Operand, Product};
use crate::cpu::Cpu;
use std::ops::Range;

/// Bytes of `a` that are kept packed for the next chunks of `b`: a share of L3.
const KEPT: usize = 4 << 20;
/// When k is cut, sums wait in scratch: for so many elements of output at a time.
const WAITING: usize = 1 << 20;
/// Where lanes lie side by side, so many bytes of them are packed at a time: a visit to a row of memory, which
/// may be a page of its own, should fetch some neighbouring lines.
const VISIT: usize = 1 << 10;

pub fn run(cpu: &Cpu, kernel: &Kernel, product: &Product<'_>) {
    // A share is whole panels where their height is fixed.
    let grain = (if kernel.rows.len() == 1 { kernel.rows.start } else { 1 }, kernel.cols);
    // Shares change with the members' paces: room for any of them, or else scratch would grow now and then.
    let room = match cpu.team.size() {
        1 => Blocks::of(kernel, product, product.m, product.n).bytes(kernel),
        _ => Blocks::most_bytes(kernel, product),
    };
    cpu.shares.run(&cpu.team, (product.m, product.n), grain, |member, share| {
        let Rectangle { rows, cols } = share;
        let blocks = Blocks::of(kernel, product, rows.len(), cols.len());
        cpu.scratch[member].with(room, |scratch| {
            let mut work = || {
                for row in rows.clone().step_by(blocks.rows) {
                    for col in cols.clone().step_by(blocks.cols) {
                        let rows = row..(row + blocks.rows).min(rows.end);
                        let cols = col..(col + blocks.cols).min(cols.end);
                        // SAFETY: the rectangle is this member's alone, and the scratch has the blocks' size.
                        unsafe { rectangle(kernel, product, &blocks, rows, cols, scratch) };
                    }
                }
            };
            // SAFETY: the kernel is of a level that this processor has.
            unsafe { (kernel.prepared)(&mut work) };
        });
    });
}

/// How a member's rectangle is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Blocks {
    /// Of k, as even as can be.
    long: usize,
    /// Of a panel of `a`.
    height: usize,
    /// Of the output that is worked on at a time.
    rows: usize,
    cols: usize,
    /// Columns of `b` that are packed at a time.
    chunk: usize,
    /// Panels of either side that are packed in one go.
    visit_a: usize,
    visit_b: usize,
    /// Panels of `a` stay packed for the next chunks, unless there is but one or they are read as they lie.
    kept: bool,
    /// k is cut, and the output is no place for sums: all the block's wait in scratch.
    waiting: bool,
}

impl Blocks {
    fn of(kernel: &Kernel, product: &Product<'_>, m: usize, n: usize) -> Blocks {
        let direct = product.target.direct().is_some();
        let pieces = kernel.pieces(direct, product.k);
        let count = product.k.div_ceil(pieces.long).max(1);
        let long = product.k.div_ceil(count).max(1).next_multiple_of(kernel.deep);
        let height = kernel.height(m);
        // Where panels are read as they lie, those that are not whole are packed by themselves at most.
        let lies = (kernel.in_place)(
            &product.a,
            Lying { lanes: 0..height, ks: 0..long, long, rows: height, cols: product.n },
        )
        .is_some();
        let visit_a = if lies { 1 } else { visit(&product.a, height) };
        let visit_b = visit(&product.b, kernel.cols);
        let whole = |len: usize, most: usize, of: usize| {
            len.next_multiple_of(of).min((most / of).max(1) * of)
        };
        let chunk = whole(n, pieces.chunk / kernel.bytes / long, kernel.cols);
        // As even as can be, too: each chunk costs a pass over `a`.
        let chunk = n.div_ceil(n.div_ceil(chunk)).next_multiple_of(kernel.cols);
        // All panels of a piece that is not whole along k are packed, otherwise one that is not in rows.
        let kept = n > chunk && !(lies && product.k.is_multiple_of(kernel.deep));
        let waiting = long < product.k && !direct;
        let most = if kept { KEPT / kernel.bytes / long } else { usize::MAX };
        let rows = whole(m, if waiting { most.min(1024) } else { most }, height * visit_a);
        let cols = whole(n, if waiting { WAITING / rows } else { usize::MAX }, chunk);
        Blocks { long, height, rows, cols, chunk, visit_a, visit_b, kept, waiting }
    }

    /// Elements from one panel to the next. A line more than they take, or else the same line of all panels
    /// would fall into one set of the cache, where a dozen of them have room.
    fn apart(&self, kernel: &Kernel, width: usize) -> usize {
        let line = 64 >> kernel.bytes.trailing_zeros();
        (width * self.long).next_multiple_of(line) + line
    }

    fn slots(&self, kernel: &Kernel) -> usize {
        if self.waiting { self.rows * self.cols } else { self.height * kernel.cols }
    }

    fn bytes(&self, kernel: &Kernel) -> usize {
        let a = if self.kept { self.rows.div_ceil(self.height) } else { self.visit_a };
        let b = self.chunk / kernel.cols;
        4 * line(self.slots(kernel))
            + kernel.bytes
                * (a * self.apart(kernel, self.height) + b * self.apart(kernel, kernel.cols))
    }

    /// No rectangle of the product needs more: its panels may be higher or lower, its chunks fuller.
    fn most_bytes(kernel: &Kernel, product: &Product<'_>) -> usize {
        let whole = Blocks::of(kernel, product, product.m, product.n);
        let (low, tall) = (kernel.rows.start, kernel.rows.end - 1);
        let visit = visit(&product.a, low);
        let pieces = kernel.pieces(product.target.direct().is_some(), product.k);
        let chunk = (pieces.chunk / kernel.bytes / whole.long)
            .max(kernel.cols)
            .min(product.n.next_multiple_of(kernel.cols));
        let rows = |most: usize| (product.m + tall * visit).min(most.max(tall * visit));
        let a = match whole.kept {
            true => rows(KEPT / kernel.bytes / whole.long).div_ceil(low).max(visit),
            false => visit,
        };
        let slots = match whole.waiting {
            true => (rows(usize::MAX) * (product.n + chunk)).min(WAITING.max(rows(1024) * chunk)),
            false => tall * kernel.cols,
        };
        let (apart_a, apart_b) = (whole.apart(kernel, tall), whole.apart(kernel, kernel.cols));
        4 * line(slots) + kernel.bytes * (a * apart_a + chunk.div_ceil(kernel.cols) * apart_b)
    }
}

/// Panels to pack at a time.
fn visit(from: &Operand<'_>, width: usize) -> usize {
    let bytes = if let Data::F32(_) = from.data { 4 } else { 2 };
    if from.k_runs { 1 } else { VISIT.div_ceil(bytes * width) }
}

/// Whole cache lines of any element.
fn line(elements: usize) -> usize {
    elements.next_multiple_of(32)
}

/// One block of the output, over all of k.
///
/// # Safety
/// The rectangle lies within the product, is this thread's alone, and `scratch` has the bytes of `blocks`; the
/// kernel is prepared.
unsafe fn rectangle(
    kernel: &Kernel,
    product: &Product<'_>,
    blocks: &Blocks,
    rows: Range<usize>,
    cols: Range<usize>,
    scratch: *mut u8,
) {
    let (k, height, width) = (product.k, blocks.height, kernel.cols);
    let panels = rows.len().div_ceil(height);
    let direct = product.target.direct();
    let in_place = |lanes: Range<usize>, ks: Range<usize>| {
        (kernel.in_place)(
            &product.a,
            Lying { lanes, ks, long: blocks.long, rows: height, cols: product.n },
        )
    };
    // SAFETY: offsets stay inside the bytes that `blocks` counted; the rest is the caller's promise.
    unsafe {
        let slots = scratch.cast::<f32>();
        let packed_b = scratch.add(4 * line(blocks.slots(kernel)));
        let (apart_a, apart_b) = (blocks.apart(kernel, height), blocks.apart(kernel, width));
        let packed_a = packed_b.add(kernel.bytes * blocks.chunk / width * apart_b);
        let mut from = 0;
        loop {
            let ks = from..(from + blocks.long).min(k);
            let long = ks.len().next_multiple_of(kernel.deep);
            let last = ks.end == k;
            for chunk in cols.clone().step_by(blocks.chunk) {
                let end = (chunk + blocks.chunk).min(cols.end);
                for panel in 0..panels {
                    let row = rows.start + panel * height;
                    let lanes = row..(row + height).min(rows.end);
                    let a = in_place(lanes.clone(), ks.clone());
                    let a = a.unwrap_or_else(|| {
                        let at = if blocks.kept { panel } else { panel % blocks.visit_a };
                        let a = packed_a.add(kernel.bytes * at * apart_a);
                        if chunk == cols.start && panel % blocks.visit_a == 0 {
                            let lanes = row..(row + height * blocks.visit_a).min(rows.end);
                            (kernel.pack_a)(
                                &Strip {
                                    from: product.a,
                                    lanes,
                                    ks: ks.clone(),
                                    width: height,
                                    apart: apart_a,
                                },
                                a,
                            );
                        }
                        Rows { start: a, stride: 0, step: 0 }
                    });
                    // The panel after this one: after the last the first again, of the next piece if it must be.
                    let after = if panel + 1 < panels { lanes.end } else { rows.start };
                    let then = match panel + 1 < panels || end < cols.end {
                        true => ks.clone(),
                        false => ks.end..(ks.end + blocks.long).min(k),
                    };
                    let next = match a.stride {
                        0 => a.start.wrapping_add(kernel.bytes * apart_a),
                        _ => in_place(after..(after + height).min(rows.end), then)
                            .map_or(a.start, |rows| rows.start),
                    };
                    // A packed panel is filled up with rows of zeros.
                    let tall = if a.stride == 0 { height } else { lanes.len() };
                    for col in (chunk..end).step_by(width) {
                        let at = (col - chunk) / width;
                        let b = packed_b.add(kernel.bytes * at * apart_b);
                        if panel == 0 && at % blocks.visit_b == 0 {
                            let lanes = col..(col + width * blocks.visit_b).min(end);
                            (kernel.pack_b)(
                                &Strip {
                                    from: product.b,
                                    lanes,
                                    ks: ks.clone(),
                                    width,
                                    apart: apart_b,
                                },
                                b,
                            );
                        }
                        let tiles = (end - chunk).div_ceil(width);
                        let ahead = Ahead { next, tile: at, tiles };
                        let cols_here = (end - col).min(width);
                        let slot = match blocks.waiting {
                            true => (col - cols.start) / width * panels + panel,
                            false => 0,
                        };
                        let sums = slots.add(slot * height * width);
                        let (rows, cols) = (lanes.len(), cols_here);
                        let tile = Tile { sums, stride: width, row, col, rows, cols };
                        let (place, place_stride) = match direct.is_some() || last {
                            true => product.target.place(row, col),
                            false => (sums.cast::<u8>().cast_const(), 4 * width),
                        };
                        let own = Sums {
                            start: sums,
                            stride: width,
                            resume: from > 0,
                            place,
                            place_stride,
                            next: match blocks.waiting && from > 0 && col + width < end {
                                true => slots.add((slot + panels) * height * width),
                                false => sums,
                            },
                        };
                        match direct {
                            // In the output itself, the edges by way of a slot: the same additions everywhere.
                            Some(out) => {
                                let resume = from > 0 || out.resume;
                                if rows == tall && cols == width {
                                    (kernel.multiply)(
                                        tall,
                                        long,
                                        a,
                                        ahead,
                                        b,
                                        out.sums(row, col, resume),
                                    );
                                } else {
                                    if resume {
                                        sums.write_bytes(0, height * width);
                                        out.lift(tile);
                                    }
                                    (kernel.multiply)(
                                        tall,
                                        long,
                                        a,
                                        ahead,
                                        b,
                                        Sums { resume, ..own },
                                    );
                                    out.lower(tile);
                                }
                            }
                            None => {
                                (kernel.multiply)(tall, long, a, ahead, b, own);
                                if last {
                                    product.target.finish(kernel.level, tile);
                                }
                            }
                        }
                    }
                }
            }
            from = ks.end;
            if last {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{DataMut, Epilogue, epilogue};
    use super::*;
    use crate::cpu::Level;

    #[test]
    fn there_is_room_for_every_share() {
        let mut shapes = Vec::new();
        for m in [9, 64, 511, 1024, 2100] {
            for n in [1, 100, 768, 2048, 4200] {
                for k in [1, 40, 512, 1500, 4100] {
                    shapes.push((m, n, k));
                }
            }
        }
        let values = vec![0.0; 4200 * 4100];
        let mut out = vec![0.0; 2100 * 4200];
        for level in Level::of_this_machine().and_below() {
            for (rounded, k_runs, accumulate) in
                [(false, true, false), (true, false, true), (false, false, true)]
            {
                let kernel = Kernel::of(level, rounded);
                for &(m, n, k) in &shapes {
                    let operand = |lanes: usize| Operand {
                        data: Data::F32(&values),
                        stride: if k_runs { k } else { lanes },
                        k_runs,
                        rounded,
                    };
                    let scale = if accumulate { 1.0 } else { 0.5 };
                    let out = DataMut::F32(&mut out);
                    let target =
                        epilogue::Target::new(out, n, accumulate, scale, Epilogue::default(), n);
                    let product = Product { m, n, k, a: operand(m), b: operand(n), target };
                    let room = Blocks::most_bytes(&kernel, &product);
                    for part in 1..=32 {
                        let (rows, cols) = (m * part / 32, n * part / 32);
                        for (rows, cols) in [(rows, n), (m, cols), (rows, cols)] {
                            if rows > 0 && cols > 0 {
                                let bytes =
                                    Blocks::of(&kernel, &product, rows, cols).bytes(&kernel);
                                assert!(
                                    bytes <= room,
                                    "{level:?} ({m}, {n}, {k}): ({rows}, {cols}) needs {bytes} of {room}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}
