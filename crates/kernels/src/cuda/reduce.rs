//! Reductions over whole tensors and over rows. The order of additions depends only on the shapes.

use super::elementwise::{THREADS, count, flag, float_kernel};
use super::{Cuda, Grid, Source};
use crate::cpu::reduce::CHECKSUM_BITS;
use crate::{Scalar, View, ViewMut};

pub(crate) const REDUCE: Source =
    Source { name: "reduce", code: include_str!("kernels/reduce.cu") };

/// Most partial sums of one tensor.
const MAX_PARTS: usize = 1024;

/// Blocks that sum the columns of a matrix together.
const COLUMN_BLOCKS: usize = 512;

/// Sum of all elements.
pub(crate) fn sum(cuda: &Cuda, x: View<'_>) -> Scalar {
    assert_eq!(x.dtype(), crate::Dtype::F32, "sum of {x:?}");
    sum_over(cuda, &[x], |_| "sum_f32")
}

pub(crate) fn sum_of_squares(cuda: &Cuda, parts: &[View<'_>]) -> Scalar {
    sum_over(cuda, parts, |x| float_kernel!("sum_of_squares", x.dtype()))
}

/// Number of elements that are infinite or NaN. Waits for the result.
pub(crate) fn count_non_finite(cuda: &Cuda, x: View<'_>) -> u64 {
    sum_over(cuda, &[x], |x| float_kernel!("count_non_finite", x.dtype())).get() as u64
}

/// Checksum of the bits of all elements, as on the CPU. Waits for the result.
pub(crate) fn checksum(cuda: &Cuda, x: View<'_>) -> u64 {
    if x.is_empty() {
        return 0;
    }
    let scratch = cuda.scratch(8);
    let sum = scratch.address();
    cuda.memset(sum, 0, 8);
    let grid = Grid::new(x.len().div_ceil(THREADS as usize * 16).min(MAX_PARTS), THREADS);
    let args = [x.into(), sum.into(), count(x.len())];
    cuda.launch(&REDUCE, float_kernel!("checksum", x.dtype()), grid, &args);
    let low = cuda.scalar(|out| {
        let args = [sum.into(), out.into(), (CHECKSUM_BITS as i32).into()];
        cuda.launch(&REDUCE, "checksum_low_bits", Grid::new(1, 1), &args);
    });
    drop(scratch);
    low.get() as u64
}

/// Adds what `kernel` computes for each tensor.
fn sum_over(cuda: &Cuda, parts: &[View<'_>], kernel: fn(&View<'_>) -> &'static str) -> Scalar {
    let blocks = |x: &View<'_>| x.len().div_ceil(THREADS as usize * 16).min(MAX_PARTS);
    let total: usize = parts.iter().map(blocks).sum();
    let scratch = cuda.scratch(total * 8);
    let mut at = scratch.address();
    for x in parts {
        let grid = Grid::new(blocks(x), THREADS);
        cuda.launch(&REDUCE, kernel(x), grid, &[(*x).into(), at.into(), count(x.len())]);
        at += blocks(x) as u64 * 8;
    }
    cuda.scalar(|out| {
        let args = [scratch.address().into(), out.into(), count(total)];
        cuda.launch(&REDUCE, "sum_f64", Grid::new(1, 1024), &args);
    })
}

/// Sums the rows of `x` into `out`.
pub(crate) fn column_sums(cuda: &Cuda, x: View<'_>, out: ViewMut<'_>, accumulate: bool) {
    column_sums_of(cuda, x, 1, out, accumulate);
}

/// Sums the rows of each of several equal runs of rows of `x` into a row of `out`.
pub(crate) fn column_sums_of(
    cuda: &Cuda,
    x: View<'_>,
    matrices: usize,
    out: ViewMut<'_>,
    accumulate: bool,
) {
    assert!(
        matrices > 0 && out.len().is_multiple_of(matrices),
        "{out:?} is not a multiple of {matrices} rows"
    );
    let n = out.len() / matrices;
    if n == 0 {
        return;
    }
    assert!(
        x.len().is_multiple_of(n * matrices),
        "{} elements are not a multiple of n={n}",
        x.len()
    );
    assert!(matrices < 1 << 16, "{matrices} matrices exceed the size of a grid");
    let rows = x.len() / n / matrices;
    let columns = n.div_ceil(32 * 16 / x.dtype().bytes());
    // Each block has at least four runs of eight rows.
    let parts = (COLUMN_BLOCKS / columns).clamp(1, rows.div_ceil(32).max(1));
    let scratch = cuda.scratch(if parts > 1 { matrices * parts * n * 4 } else { 0 });
    let kernel = float_kernel!("column_sums", x.dtype());
    let (memory, to) = (scratch.address(), out.address());
    let args = [x.into(), memory.into(), to.into(), count(rows), count(n), flag(accumulate)];
    cuda.launch(&REDUCE, kernel, Grid::of([columns, parts, matrices], THREADS), &args);
    if parts > 1 {
        add_parts(cuda, memory, [matrices, parts, n], to, accumulate);
    }
}

/// Sums the partial sums (matrices, parts, n), f32, into (matrices, n).
pub(super) fn add_parts(
    cuda: &Cuda,
    memory: u64,
    [matrices, parts, n]: [usize; 3],
    to: u64,
    accumulate: bool,
) {
    let args = [memory.into(), to.into(), count(parts), count(n), flag(accumulate)];
    cuda.launch(&REDUCE, "add_parts", Grid::of([n.div_ceil(32), 1, matrices], 1024), &args);
}
