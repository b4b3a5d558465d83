//! Block sizes of a multiply: how a thread's rectangle of the output is cut, and the scratch memory that takes.

use super::kernel::MicroKernel;
use super::panel::PanelRequest;
use super::{Data, Operand, Product};

/// Bytes of packed `a` that are kept for the next chunks of `b`: a part of L3.
const PACKED_A_BYTES: usize = 4 << 20;
/// Elements of output whose partial sums are kept in scratch at a time when k is split.
const PARTIAL_SUMS: usize = 1 << 20;
/// Bytes packed from one row of memory at a time when the elements of one k are contiguous. Each row may be on a
/// page of its own, so a visit should read several neighbouring cache lines.
const PACK_ROW_BYTES: usize = 1 << 10;

/// How a thread's rectangle is blocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocking {
    /// Block length along k. Blocks are of nearly equal length.
    pub kc: usize,
    /// Rows of a panel of `a`.
    pub mr: usize,
    /// Rows and columns of the output that are computed at a time.
    pub rows: usize,
    pub cols: usize,
    /// Columns of `b` that are packed at a time.
    pub chunk: usize,
    /// Panels of `a` and of `b` that are packed in one call.
    pub pack_a: usize,
    pub pack_b: usize,
    /// All panels of `a` stay packed for the next chunks.
    pub keep_a: bool,
    /// k is split and partial sums cannot be kept in the output: those of the whole block are kept in scratch.
    pub partial_sums: bool,
}

impl Blocking {
    pub fn new(kernel: &MicroKernel, product: &Product<'_>, m: usize, n: usize) -> Blocking {
        let direct = product.output.direct().is_some();
        let sizes = kernel.k_blocking(direct, product.k);
        let blocks = product.k.div_ceil(sizes.kc).max(1);
        let kc = product.k.div_ceil(blocks).max(1).next_multiple_of(kernel.k_multiple);
        let mr = kernel.panel_height(m);
        // Where panels are read in place, only incomplete ones are packed, one at a time.
        let request = PanelRequest { rows: 0..mr, ks: 0..kc, kc, mr, n: product.n };
        let in_place = (kernel.unpacked_a)(&product.a, request).is_some();
        let pack_a = if in_place { 1 } else { panels_per_pack(&product.a, mr) };
        let pack_b = panels_per_pack(&product.b, kernel.nr);
        let bounded = |len: usize, most: usize, multiple: usize| {
            len.next_multiple_of(multiple).min((most / multiple).max(1) * multiple)
        };
        let chunk = bounded(n, sizes.chunk_bytes / kernel.element_bytes / kc, kernel.nr);
        // Chunks have nearly equal width, because each one costs a pass over `a`.
        let chunk = n.div_ceil(n.div_ceil(chunk)).next_multiple_of(kernel.nr);
        // If k is not a multiple of `k_multiple`, all panels of the last block are packed; otherwise at most the
        // last, incomplete one.
        let keep_a = n > chunk && !(in_place && product.k.is_multiple_of(kernel.k_multiple));
        let partial_sums = kc < product.k && !direct;
        let most = if keep_a { PACKED_A_BYTES / kernel.element_bytes / kc } else { usize::MAX };
        let rows = bounded(m, if partial_sums { most.min(1024) } else { most }, mr * pack_a);
        let cols = bounded(n, if partial_sums { PARTIAL_SUMS / rows } else { usize::MAX }, chunk);
        Blocking { kc, mr, rows, cols, chunk, pack_a, pack_b, keep_a, partial_sums }
    }

    /// Elements from one panel of `width` rows or columns to the next. One cache line more than a panel takes:
    /// otherwise the same line of all panels would map to one cache set, which holds a dozen.
    pub fn panel_stride(&self, kernel: &MicroKernel, width: usize) -> usize {
        let line = 64 >> kernel.element_bytes.trailing_zeros();
        (width * self.kc).next_multiple_of(line) + line
    }

    /// Bytes of the accumulator tiles at the start of the scratch.
    pub fn accumulator_bytes(&self, kernel: &MicroKernel) -> usize {
        let elements = if self.partial_sums { self.rows * self.cols } else { self.mr * kernel.nr };
        4 * whole_lines(elements)
    }

    pub fn scratch_bytes(&self, kernel: &MicroKernel) -> usize {
        let a = if self.keep_a { self.rows.div_ceil(self.mr) } else { self.pack_a };
        let b = self.chunk / kernel.nr;
        self.accumulator_bytes(kernel)
            + kernel.element_bytes
                * (a * self.panel_stride(kernel, self.mr)
                    + b * self.panel_stride(kernel, kernel.nr))
    }

    /// Upper bound of `scratch_bytes` over all rectangles of the product, whose panels may be taller or lower and
    /// whose chunks may be fuller.
    pub fn max_scratch_bytes(kernel: &MicroKernel, product: &Product<'_>) -> usize {
        let whole = Blocking::new(kernel, product, product.m, product.n);
        let (low, tall) = (kernel.mr.start, kernel.mr.end - 1);
        let pack_a = panels_per_pack(&product.a, low);
        let sizes = kernel.k_blocking(product.output.direct().is_some(), product.k);
        let chunk = (sizes.chunk_bytes / kernel.element_bytes / whole.kc)
            .max(kernel.nr)
            .min(product.n.next_multiple_of(kernel.nr));
        let rows = |most: usize| (product.m + tall * pack_a).min(most.max(tall * pack_a));
        let a = match whole.keep_a {
            true => {
                let most = PACKED_A_BYTES / kernel.element_bytes / whole.kc;
                rows(most).div_ceil(low).max(pack_a)
            }
            false => pack_a,
        };
        let sums = match whole.partial_sums {
            true => {
                let all = rows(usize::MAX) * (product.n + chunk);
                all.min(PARTIAL_SUMS.max(rows(1024) * chunk))
            }
            false => tall * kernel.nr,
        };
        let (stride_a, stride_b) =
            (whole.panel_stride(kernel, tall), whole.panel_stride(kernel, kernel.nr));
        4 * whole_lines(sums)
            + kernel.element_bytes * (a * stride_a + chunk.div_ceil(kernel.nr) * stride_b)
    }
}

fn panels_per_pack(from: &Operand<'_>, width: usize) -> usize {
    let bytes = if let Data::F32(_) = from.data { 4 } else { 2 };
    if from.k_contiguous { 1 } else { PACK_ROW_BYTES.div_ceil(bytes * width) }
}

/// Rounds up to whole cache lines of any element type.
fn whole_lines(elements: usize) -> usize {
    elements.next_multiple_of(32)
}

#[cfg(test)]
mod tests {
    use super::super::{DataMut, Gemm, Matrix};
    use super::*;
    use crate::cpu::Level;
    use half::bf16;

    #[test]
    fn scratch_suffices_for_every_rectangle() {
        let mut shapes = Vec::new();
        for m in [9, 64, 511, 1024, 2100] {
            for n in [1, 100, 768, 2048, 4200] {
                for k in [1, 40, 512, 1500, 4100] {
                    shapes.push((m, n, k));
                }
            }
        }
        let values = vec![0.0; 4200 * 4100];
        let rounded = vec![bf16::ZERO; 4200 * 4100];
        let mut out = vec![0.0; 2100 * 4200];
        for level in Level::of_this_machine().and_below() {
            for (is_bf16, k_contiguous, accumulate) in
                [(false, true, false), (true, false, true), (false, false, true)]
            {
                let kernel = MicroKernel::select(level, is_bf16);
                for &(m, n, k) in &shapes {
                    let matrix = |outer: usize, transposed: bool| Matrix {
                        data: Data::F32(&values),
                        stride: if k_contiguous { k } else { outer },
                        transposed,
                    };
                    let mut b = matrix(n, k_contiguous);
                    if is_bf16 {
                        b.data = Data::Bf16(&rounded);
                    }
                    let product = Product::new(Gemm {
                        m,
                        n,
                        k,
                        a: matrix(m, !k_contiguous),
                        b,
                        out: DataMut::F32(&mut out),
                        out_stride: n,
                        accumulate,
                        scale: if accumulate { 1.0 } else { 0.5 },
                        epilogue: Default::default(),
                    });
                    check_rectangles(&kernel, &product);
                }
            }
        }
    }

    fn check_rectangles(kernel: &MicroKernel, product: &Product<'_>) {
        let Product { m, n, k, .. } = *product;
        let bound = Blocking::max_scratch_bytes(kernel, product);
        for part in 1..=32 {
            let (rows, cols) = (m * part / 32, n * part / 32);
            for (rows, cols) in [(rows, n), (m, cols), (rows, cols)] {
                if rows > 0 && cols > 0 {
                    let bytes = Blocking::new(kernel, product, rows, cols).scratch_bytes(kernel);
                    let level = kernel.level;
                    assert!(
                        bytes <= bound,
                        "{level:?} ({m}, {n}, {k}): ({rows}, {cols}) needs {bytes} of {bound}"
                    );
                }
            }
        }
    }
}
