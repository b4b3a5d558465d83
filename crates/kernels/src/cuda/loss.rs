//! Cross-entropy of logits against targets. Logits are f32 or bf16.

use super::elementwise::{THREADS, count, float_kernel};
use super::{Cuda, Grid, Source};
use crate::{CrossEntropy, Dtype, LogitGradient, LogitShard, SoftmaxStats, View, ViewMut};

pub(crate) const LOSS: Source = Source { name: "loss", code: include_str!("kernels/loss.cu") };

/// Bytes of shared memory for reductions in the fused kernel.
const REDUCTIONS: usize = 2 * (32 * 8 + 16);

/// Loss of each row, and the gradient of its logits. A target outside the vocabulary gives a loss of NaN.
pub(crate) fn cross_entropy(cuda: &Cuda, work: CrossEntropy<'_>) {
    let CrossEntropy { logits, targets, losses, gradient } = work;
    let (rows, vocab) = shape(logits.as_view(), targets, &losses);
    if rows == 0 {
        return;
    }
    let logits = logits.as_view();
    let Some((to, scale)) = destination(logits, gradient) else {
        return write_losses(cuda, logits, targets, &losses, [0, 0]);
    };
    let width = 16 / logits.dtype().bytes();
    let shared = REDUCTIONS + 16 * (vocab / width + 2);
    // Both addresses allow vectors of `width` elements.
    let aligned = logits.address() % 16 == 0 && to.address % 16 == 0;
    if aligned && shared <= cuda.context().shared_per_block {
        // Each block takes one row after the other. As many threads as fit share the shared memory.
        let per_processor = (cuda.context().shared_per_block / (shared + 1024)).clamp(1, 4);
        let threads = [1024, 512, 512, 256][per_processor - 1];
        let grid = Grid::new(rows.min(per_processor * cuda.multiprocessors()), threads);
        let kernel = float_kernel!("cross_entropy", logits.dtype(), to.dtype);
        let args = [
            logits.into(),
            to.address.into(),
            targets.into(),
            (&losses).into(),
            count(rows),
            count(vocab),
            scale.into(),
        ];
        return cuda.launch(&LOSS, kernel, grid.shared(shared), &args);
    }
    // Rows too long for shared memory are read twice.
    let scratch = cuda.scratch(rows * 8);
    let [max, sum] = [scratch.address(), scratch.address() + rows as u64 * 4];
    write_losses(cuda, logits, targets, &losses, [max, sum]);
    let work = Gradient { logits, targets, max, sum, first: 0, scale };
    work.write(cuda, to);
}

/// The largest logit of each row.
pub(crate) fn largest_logits(cuda: &Cuda, logits: View<'_>, max: ViewMut<'_>) {
    let (rows, width) = (max.len(), logits.len().checked_div(max.len()).unwrap_or(0));
    assert_eq!(logits.len(), rows * width, "{rows} rows of {logits:?}");
    let args = [logits.into(), max.into(), count(rows), count(width)];
    let kernel = float_kernel!("largest_logits", logits.dtype());
    cuda.launch(&LOSS, kernel, row_per_block(rows, width), &args);
}

pub(crate) fn logit_sums(
    cuda: &Cuda,
    shard: LogitShard<'_>,
    max: View<'_>,
    sum: ViewMut<'_>,
    target: ViewMut<'_>,
) {
    let LogitShard { logits, targets, first } = shard;
    let (rows, width) = shape(logits, targets, &sum);
    assert_eq!((max.len(), target.len()), (rows, rows), "statistics of {rows} rows");
    let args = [
        logits.into(),
        targets.into(),
        max.into(),
        sum.into(),
        target.into(),
        count(rows),
        count(width),
        count(first),
    ];
    let kernel = float_kernel!("logit_sums", logits.dtype());
    cuda.launch(&LOSS, kernel, row_per_block(rows, width), &args);
}

/// `cross_entropy` for a shard of the vocabulary, given the statistics of all shards.
pub(crate) fn cross_entropy_shard(
    cuda: &Cuda,
    work: CrossEntropy<'_>,
    first: usize,
    stats: SoftmaxStats<'_>,
) {
    let CrossEntropy { logits, targets, losses, gradient } = work;
    let SoftmaxStats { max, sum, target } = stats;
    let (rows, _) = shape(logits.as_view(), targets, &losses);
    for stat in [max, sum, target] {
        assert_eq!((stat.len(), stat.dtype()), (rows, Dtype::F32), "statistics of {rows} rows");
    }
    let args = [max.into(), sum.into(), target.into(), targets.into(), losses.into(), count(rows)];
    cuda.launch(&LOSS, "shard_losses", Grid::over(rows, THREADS), &args);
    let logits = logits.as_view();
    if let Some((to, scale)) = destination(logits, gradient) {
        let (max, sum) = (max.address(), sum.address());
        Gradient { logits, targets, max, sum, first, scale }.write(cuda, to);
    }
}

/// Writes the losses, and the softmax statistics unless their addresses are null.
fn write_losses(
    cuda: &Cuda,
    logits: View<'_>,
    targets: View<'_>,
    losses: &ViewMut<'_>,
    [max, sum]: [u64; 2],
) {
    let (rows, vocab) = shape(logits, targets, losses);
    let args = [
        logits.into(),
        targets.into(),
        losses.into(),
        max.into(),
        sum.into(),
        count(rows),
        count(vocab),
    ];
    let kernel = float_kernel!("losses", logits.dtype());
    cuda.launch(&LOSS, kernel, row_per_block(rows, vocab), &args);
}

/// Where a gradient is written.
struct Destination {
    address: u64,
    dtype: Dtype,
}

/// The destination and factor of the gradient, if one is needed.
fn destination(logits: View<'_>, gradient: LogitGradient<'_>) -> Option<(Destination, f32)> {
    match gradient {
        LogitGradient::None => None,
        LogitGradient::InPlace(scale) => {
            Some((Destination { address: logits.address(), dtype: logits.dtype() }, scale))
        }
        LogitGradient::Into(to, scale) => {
            assert_eq!(to.len(), logits.len(), "gradient of {logits:?} to {to:?}");
            Some((Destination { address: to.address(), dtype: to.dtype() }, scale))
        }
    }
}

/// The gradient of logits with known softmax statistics.
struct Gradient<'a> {
    logits: View<'a>,
    targets: View<'a>,
    /// Addresses of the statistics.
    max: u64,
    sum: u64,
    /// Token id of the first logit.
    first: usize,
    scale: f32,
}

impl Gradient<'_> {
    fn write(self, cuda: &Cuda, to: Destination) {
        let Gradient { logits, targets, max, sum, first, scale } = self;
        let rows = targets.len();
        let width = logits.len().checked_div(rows).unwrap_or(0);
        let args = [
            logits.into(),
            to.address.into(),
            targets.into(),
            max.into(),
            sum.into(),
            count(rows),
            count(width),
            count(first),
            scale.into(),
        ];
        let kernel = float_kernel!("logit_gradient", logits.dtype(), to.dtype);
        cuda.launch(&LOSS, kernel, row_per_block(rows, width), &args);
    }
}

/// Short rows take fewer threads.
fn row_per_block(rows: usize, width: usize) -> Grid {
    Grid::new(rows, width.div_ceil(16).next_multiple_of(32).clamp(32, 512) as u32)
}

/// Checks the lengths and returns the number of rows and their width.
fn shape(logits: View<'_>, targets: View<'_>, losses: &ViewMut<'_>) -> (usize, usize) {
    let rows = targets.len();
    assert_eq!(
        (losses.len(), losses.dtype(), targets.dtype()),
        (rows, Dtype::F32, Dtype::U32),
        "targets, losses and statistics must have one element per row"
    );
    assert!(
        logits.len().is_multiple_of(rows.max(1)),
        "{} logits are not a multiple of {rows} rows",
        logits.len()
    );
    (rows, logits.len().checked_div(rows).unwrap_or(0))
}
