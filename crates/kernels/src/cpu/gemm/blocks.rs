//! The loop nest of the multiply: which panels are packed when, and in which cache they stay. The arithmetic is
//! the micro-kernel's.

use super::Product;
use super::blocking::Blocking;
use super::epilogue::{DirectOutput, Tile};
use super::grid::Rectangle;
use super::kernel::MicroKernel;
use super::panel::{Accumulator, KernelArgs, PackJob, PanelA, PanelRequest, PrefetchA};
use crate::cpu::Cpu;
use std::ops::Range;

pub fn run(cpu: &Cpu, kernel: &MicroKernel, product: &Product<'_>) {
    // Rectangles consist of whole panels if all panels have the same height.
    let granularity = (if kernel.mr.len() == 1 { kernel.mr.start } else { 1 }, kernel.nr);
    // Rectangles change with the measured speeds. The scratch suffices for any of them, so it grows only once.
    let bytes = match cpu.team.size() {
        1 => Blocking::new(kernel, product, product.m, product.n).scratch_bytes(kernel),
        _ => Blocking::max_scratch_bytes(kernel, product),
    };
    cpu.gemm_balance.run(&cpu.team, (product.m, product.n), granularity, |thread, rectangle| {
        cpu.scratch[thread].with(bytes, |scratch| {
            // SAFETY: the rectangle belongs to this thread, the scratch is as large as any blocking needs, and
            // the processor supports the kernel's level.
            unsafe {
                (kernel.configured)(&mut || multiply(kernel, product, rectangle, scratch));
            }
        });
    });
}

/// # Safety
/// The rectangle is within the product and no other thread writes to it; `scratch` has the size that its
/// blocking needs; the kernel's registers are configured.
unsafe fn multiply(
    kernel: &MicroKernel,
    product: &Product<'_>,
    Rectangle { rows, cols }: &Rectangle,
    scratch: *mut u8,
) {
    let blocking = Blocking::new(kernel, product, rows.len(), cols.len());
    for row in rows.clone().step_by(blocking.rows) {
        for col in cols.clone().step_by(blocking.cols) {
            let block = Block {
                kernel,
                product,
                blocking: &blocking,
                rows: row..(row + blocking.rows).min(rows.end),
                cols: col..(col + blocking.cols).min(cols.end),
                direct: product.output.direct(),
                buffers: Buffers::new(kernel, &blocking, scratch),
            };
            // SAFETY: the caller's promise.
            unsafe { block.run() };
        }
    }
}

/// Parts of the scratch memory, and bytes from one packed panel to the next.
struct Buffers {
    accumulators: *mut f32,
    packed_a: *mut u8,
    packed_b: *mut u8,
    stride_a: usize,
    stride_b: usize,
}

impl Buffers {
    fn new(kernel: &MicroKernel, blocking: &Blocking, scratch: *mut u8) -> Buffers {
        let stride_a = kernel.element_bytes * blocking.panel_stride(kernel, blocking.mr);
        let stride_b = kernel.element_bytes * blocking.panel_stride(kernel, kernel.nr);
        let packed_b = scratch.wrapping_add(blocking.accumulator_bytes(kernel));
        let packed_a = packed_b.wrapping_add(blocking.chunk / kernel.nr * stride_b);
        Buffers { accumulators: scratch.cast(), packed_a, packed_b, stride_a, stride_b }
    }
}

/// One block of the output, computed over all of k. The unsafe methods rely on the promise made to `multiply`.
struct Block<'a> {
    kernel: &'a MicroKernel,
    product: &'a Product<'a>,
    blocking: &'a Blocking,
    rows: Range<usize>,
    cols: Range<usize>,
    direct: Option<DirectOutput>,
    buffers: Buffers,
}

/// One panel of `a` while it is multiplied with a chunk of `b`.
struct RowPanel {
    index: usize,
    rows: Range<usize>,
    ks: Range<usize>,
    /// Length of `ks`, padded to what the kernel needs.
    k: usize,
    chunk: Range<usize>,
    /// Panels of `b` in the chunk.
    tiles: usize,
    a: PanelA,
    next_a: *const u8,
}

impl Block<'_> {
    unsafe fn run(&self) {
        let mut start = 0;
        loop {
            let ks = start..(start + self.blocking.kc).min(self.product.k);
            for col in self.cols.clone().step_by(self.blocking.chunk) {
                let chunk = col..(col + self.blocking.chunk).min(self.cols.end);
                for index in 0..self.row_panels() {
                    // SAFETY: the caller's promise.
                    unsafe { self.row_panel(index, &ks, &chunk) };
                }
            }
            if ks.end == self.product.k {
                break;
            }
            start = ks.end;
        }
    }

    fn row_panels(&self) -> usize {
        self.rows.len().div_ceil(self.blocking.mr)
    }

    /// Multiplies one panel of `a` with all panels of a chunk of `b`.
    unsafe fn row_panel(&self, index: usize, ks: &Range<usize>, chunk: &Range<usize>) {
        let start = self.rows.start + index * self.blocking.mr;
        let rows = start..(start + self.blocking.mr).min(self.rows.end);
        // SAFETY: the caller's promise.
        unsafe {
            let a = self
                .in_place(rows.clone(), ks.clone())
                .unwrap_or_else(|| self.packed_a(index, ks, chunk.start == self.cols.start));
            let next_a = self.next_a(a, index, ks, chunk);
            let k = ks.len().next_multiple_of(self.kernel.k_multiple);
            let tiles = chunk.len().div_ceil(self.kernel.nr);
            let (ks, chunk) = (ks.clone(), chunk.clone());
            let panel = RowPanel { index, rows, ks, k, chunk, tiles, a, next_a };
            for tile in 0..tiles {
                let b = self.packed_b(&panel, tile);
                self.tile(&panel, tile, b);
            }
        }
    }

    fn in_place(&self, rows: Range<usize>, ks: Range<usize>) -> Option<PanelA> {
        let Blocking { kc, mr, .. } = *self.blocking;
        let request = PanelRequest { rows, ks, kc, mr, n: self.product.n };
        (self.kernel.unpacked_a)(&self.product.a, request)
    }

    /// A packed panel of `a`. `pack_a` panels are packed together, during the first chunk.
    unsafe fn packed_a(&self, index: usize, ks: &Range<usize>, first_chunk: bool) -> PanelA {
        let Blocking { mr, pack_a, keep_a, .. } = *self.blocking;
        let slot = if keep_a { index } else { index % pack_a };
        // SAFETY: the buffer holds all panels that are kept.
        let start = unsafe { self.buffers.packed_a.add(slot * self.buffers.stride_a) };
        if first_chunk && index.is_multiple_of(pack_a) {
            let row = self.rows.start + index * mr;
            let job = PackJob {
                from: self.product.a,
                outer: row..(row + mr * pack_a).min(self.rows.end),
                ks: ks.clone(),
                width: mr,
                panel_stride: self.buffers.stride_a / self.kernel.element_bytes,
            };
            // SAFETY: the rows are in the operand, and the buffer holds `pack_a` more panels.
            unsafe { (self.kernel.pack_a)(&job, start) };
        }
        PanelA { start, row_stride: 0, k_stride: 0 }
    }

    /// Start of the panel of `a` that is multiplied after this one. After the last panel that is the first one
    /// again, of the next block of k if this was the last chunk.
    fn next_a(
        &self,
        a: PanelA,
        index: usize,
        ks: &Range<usize>,
        chunk: &Range<usize>,
    ) -> *const u8 {
        let Blocking { kc, mr, .. } = *self.blocking;
        if a.row_stride == 0 {
            return a.start.wrapping_add(self.buffers.stride_a);
        }
        let last_panel = index + 1 == self.row_panels();
        let row = if last_panel { self.rows.start } else { self.rows.start + (index + 1) * mr };
        let ks = match last_panel && chunk.end == self.cols.end {
            true => ks.end..(ks.end + kc).min(self.product.k),
            false => ks.clone(),
        };
        let rows = row..(row + mr).min(self.rows.end);
        self.in_place(rows, ks).map_or(a.start, |next| next.start)
    }

    /// A packed panel of `b`. Panels are packed just before their first use, by the first panel of `a`.
    unsafe fn packed_b(&self, panel: &RowPanel, index: usize) -> *const u8 {
        let (nr, pack_b) = (self.kernel.nr, self.blocking.pack_b);
        // SAFETY: the buffer holds all panels of a chunk.
        let start = unsafe { self.buffers.packed_b.add(index * self.buffers.stride_b) };
        if panel.index == 0 && index.is_multiple_of(pack_b) {
            let col = panel.chunk.start + index * nr;
            let job = PackJob {
                from: self.product.b,
                outer: col..(col + nr * pack_b).min(panel.chunk.end),
                ks: panel.ks.clone(),
                width: nr,
                panel_stride: self.buffers.stride_b / self.kernel.element_bytes,
            };
            // SAFETY: the columns are in the operand, and the buffer holds a whole chunk.
            unsafe { (self.kernel.pack_b)(&job, start) };
        }
        start
    }

    /// Multiplies one panel of `a` with one of `b`, and finishes the tile if this is the last block of k.
    unsafe fn tile(&self, panel: &RowPanel, index: usize, b: *const u8) {
        let (mr, nr) = (self.blocking.mr, self.kernel.nr);
        let (row, col) = (panel.rows.start, panel.chunk.start + index * nr);
        let rows = panel.rows.len();
        let cols = (panel.chunk.end - col).min(nr);
        let args = KernelArgs {
            // A packed panel is padded with rows of zeros.
            rows: if panel.a.row_stride == 0 { mr } else { rows },
            k: panel.k,
            a: panel.a,
            b,
            prefetch: PrefetchA { next: panel.next_a, tile: index, tiles: panel.tiles },
            acc: self.scratch_accumulator(panel, col),
        };
        let tile = Tile { sums: args.acc.start, stride: nr, row, col, rows, cols };
        // SAFETY: the tile is within the block, and its accumulator within the scratch or the output.
        unsafe {
            let Some(output) = self.direct else {
                (self.kernel.multiply)(&args);
                if panel.ks.end == self.product.k {
                    self.product.output.finish(self.kernel.level, tile);
                }
                return;
            };
            let accumulate = panel.ks.start > 0 || output.accumulate;
            if rows == args.rows && cols == nr {
                let acc = output.accumulator(row, col, accumulate);
                return (self.kernel.multiply)(&KernelArgs { acc, ..args });
            }
            // Incomplete tiles are computed in scratch, with the same additions.
            if accumulate {
                args.acc.start.write_bytes(0, mr * nr);
                output.load(tile);
            }
            let acc = Accumulator { accumulate, ..args.acc };
            (self.kernel.multiply)(&KernelArgs { acc, ..args });
            output.store(tile);
        }
    }

    /// The tile's accumulator in scratch: its own if partial sums are kept there, otherwise a shared one.
    fn scratch_accumulator(&self, panel: &RowPanel, col: usize) -> Accumulator {
        let (nr, partial_sums) = (self.kernel.nr, self.blocking.partial_sums);
        let tile_len = self.blocking.mr * nr;
        let slot = match partial_sums {
            true => (col - self.cols.start) / nr * self.row_panels() + panel.index,
            false => 0,
        };
        let start = self.buffers.accumulators.wrapping_add(slot * tile_len);
        let last = panel.ks.end == self.product.k;
        let (output, output_stride) = match self.direct.is_some() || last {
            true => self.product.output.place(panel.rows.start, col),
            false => (start.cast::<u8>().cast_const(), 4 * nr),
        };
        let accumulate = panel.ks.start > 0;
        let next = match partial_sums && accumulate && col + nr < panel.chunk.end {
            true => start.wrapping_add(self.row_panels() * tile_len),
            false => start,
        };
        Accumulator { start, stride: nr, accumulate, output, output_stride, next }
    }
}

#[cfg(test)]
mod tests {
    use crate::cpu::gemm::{self, Data, DataMut, Gemm, Matrix};
    use crate::cpu::{Cpu, Level};

    #[test]
    fn bits_do_not_depend_on_the_partition() {
        let (m, n, k) = (200, 330, 1100);
        let values = |len: usize| (0..len).map(|i| ((i * 7919) % 1013) as f32 / 77.0 - 6.0);
        let (a, b): (Vec<f32>, Vec<f32>) = (values(m * k).collect(), values(n * k).collect());
        let multiply = |cpu: &Cpu, scale| {
            let mut out = vec![0.0; m * n];
            let matrix = |data, transposed| Matrix { data: Data::F32(data), stride: k, transposed };
            gemm::run(
                cpu,
                Gemm {
                    m,
                    n,
                    k,
                    a: matrix(&a, false),
                    b: matrix(&b, true),
                    out: DataMut::F32(&mut out),
                    out_stride: n,
                    accumulate: false,
                    scale,
                    epilogue: Default::default(),
                },
            );
            out
        };
        for level in Level::of_this_machine().and_below() {
            let (one, four) = (Cpu::at(level, 1), Cpu::at(level, 4));
            // Partial sums in the output, and in scratch.
            for scale in [1.0, 0.5] {
                let expected = multiply(&one, scale);
                for speeds in [[1.0, 0.1, 0.5, 0.7], [0.1, 1.0, 0.1, 0.1], [0.3, 0.3, 1.0, 0.9]] {
                    four.gemm_balance.set_speeds(&speeds);
                    let same = multiply(&four, scale) == expected;
                    assert!(same, "{level:?}, {speeds:?}, scale {scale}");
                }
            }
        }
    }
}
