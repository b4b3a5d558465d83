//! Random numbers by position, with the same bits as on the CPU.

use super::elementwise::{THREADS, count, float_kernel};
use super::{Cuda, Grid, Source};
use crate::cpu::random::GROUP;
use crate::{DropoutMask, RandomKey, ViewMut};

pub(crate) const RANDOM: Source =
    Source { name: "random", code: include_str!("kernels/random.cu") };

/// Normal numbers of the indices from `first` on.
pub(crate) fn normal(cuda: &Cuda, out: ViewMut<'_>, key: RandomKey, first: u64, std: f32) {
    let (n, kernel) = (out.len(), float_kernel!("normal", out.dtype()));
    let args = [out.into(), count(n), key.seed.into(), key.stream.into(), first.into(), std.into()];
    cuda.launch(&RANDOM, kernel, grid(n), &args);
}

pub(crate) fn dropout(cuda: &Cuda, x: ViewMut<'_>, mask: &DropoutMask) {
    let (n, kernel) = (x.len(), float_kernel!("dropout", x.dtype()));
    let args = [
        x.into(),
        count(n),
        mask.key.seed.into(),
        mask.key.stream.into(),
        mask.first.into(),
        mask.threshold().into(),
        mask.scale().into(),
    ];
    cuda.launch(&RANDOM, kernel, grid(n), &args);
}

/// A thread for each counter of the groups that contain `n` indices.
fn grid(n: usize) -> Grid {
    if n == 0 {
        return Grid::new(0, THREADS);
    }
    Grid::over((n.div_ceil(GROUP) + 1) * GROUP / 4, THREADS)
}
