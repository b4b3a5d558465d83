//! LayerNorm and RMSNorm.

use super::elementwise::{count, flag, float_kernel, optional, small, vectors};
use super::{Arg, Cuda, Grid, Source};
use crate::{Dtype, NormGradients, NormParams, View, ViewMut};

pub(crate) const NORM: Source = Source { name: "norm", code: include_str!("kernels/norm.cu") };

/// Largest width of a row that one warp normalizes, as in the kernel.
const WARP_DIM: usize = 1024;

/// Threads of a block of a backward pass, unless one row needs more.
const BLOCK: usize = 512;

/// As in the kernel.
const MOST_GROUPS: usize = 8;

/// `out = norm(x)`, after adding `branch` to `x` if there is one.
pub(crate) struct Forward<'a> {
    pub params: NormParams<'a>,
    pub x: View<'a>,
    /// Added to `x`, which is then written.
    pub branch: Option<View<'a>>,
    pub eps: f32,
    pub out: ViewMut<'a>,
    pub stats: ViewMut<'a>,
}

pub(crate) fn forward(cuda: &Cuda, work: Forward<'_>) {
    let Forward { params, x, branch, eps, out, stats } = work;
    let (gain, bias) = parameters(params);
    let (rows, dim) = shape(x, gain, bias);
    let others = [out.as_view()].into_iter().chain(branch);
    assert_same(x, others);
    assert_eq!(stats.len(), rows * stats_per_row(bias.is_some()), "statistics of {rows} rows");
    let grid = if dim <= WARP_DIM {
        Grid::new(rows.div_ceil(2), 64)
    } else {
        // Few threads with long parts of a row wait less for each other.
        Grid::new(rows, dim.div_ceil(32).next_multiple_of(32).clamp(64, 512) as u32)
    };
    let kernel = match branch {
        None => float_kernel!("norm", x.dtype()),
        Some(_) => float_kernel!("add_norm", x.dtype()),
    };
    let args = [
        x.into(),
        optional(branch),
        gain.into(),
        optional(bias),
        out.into(),
        stats.into(),
        count(rows),
        small(dim),
        eps.into(),
    ];
    cuda.launch(&NORM, kernel, grid, &args);
}

/// Recomputes the output from the statistics, with identical bits.
pub(crate) fn recompute(
    cuda: &Cuda,
    params: NormParams<'_>,
    x: View<'_>,
    stats: View<'_>,
    out: ViewMut<'_>,
) {
    let (gain, bias) = parameters(params);
    let (rows, dim) = shape(x, gain, bias);
    assert_same(x, [out.as_view()]);
    assert_eq!(stats.len(), rows * stats_per_row(bias.is_some()), "statistics of {rows} rows");
    let args =
        [x.into(), gain.into(), optional(bias), stats.into(), out.into(), count(rows), count(dim)];
    let kernel = float_kernel!("norm_recompute", x.dtype());
    cuda.launch(&NORM, kernel, vectors(x.len(), x.dtype(), 2), &args);
}

/// Inputs of a backward pass.
#[derive(Clone, Copy)]
pub(crate) struct Backward<'a> {
    pub x: View<'a>,
    pub gain: View<'a>,
    pub stats: View<'a>,
    pub dy: View<'a>,
}

/// Adds the gradient of the input to `dx` and computes the gradients of the parameters. `dx_sums` receives the sums of
/// the columns of the new `dx`, like a gradient of the parameters.
pub(crate) fn backward(
    cuda: &Cuda,
    from: Backward<'_>,
    dx: ViewMut<'_>,
    gradients: NormGradients<'_>,
    dx_sums: Option<ViewMut<'_>>,
) {
    let Backward { x, gain, stats, dy } = from;
    let NormGradients { gain: dgain, bias: dbias, accumulate } = gradients;
    let layer = dbias.is_some();
    let (rows, dim) = shape(x, gain, None);
    assert_same(x, [dy, dx.as_view()]);
    assert_eq!(stats.len(), rows * stats_per_row(layer), "statistics of {rows} rows");
    let sums = [Some(&dgain), dbias.as_ref(), dx_sums.as_ref()];
    assert!(
        sums.iter().flatten().all(|sum| sum.len() == dim && sum.dtype() == Dtype::F32),
        "gradients of parameters have {dim} elements of f32"
    );
    let aligned = [x, gain, dy, dx.as_view()].iter().all(|view| view.address() % 16 == 0);
    let variant = Variant::new(x.dtype(), dim, aligned);
    let blocks = rows.div_ceil(variant.rows * variant.groups);
    let blocks = blocks.min(cuda.multiprocessors() * variant.per_processor());
    let scratch = cuda.scratch(blocks * 3 * dim * 4);
    let parts = scratch.address();
    let args = [
        x.into(),
        gain.into(),
        stats.into(),
        dy.into(),
        dx.into(),
        parts.into(),
        count(rows),
        small(dim),
        flag(layer),
        small(variant.threads),
    ];
    let grid = Grid::new(blocks, (variant.threads * variant.groups) as u32);
    let grid = grid.shared(if variant.groups > 1 { variant.groups * 3 * dim * 4 } else { 0 });
    cuda.launch(&NORM, variant.kernel, grid, &args);
    let [dgain, dbias, dx_sums] = sums.map(|sum| Arg::from(sum.map_or(0, |sum| sum.address())));
    let args = [parts.into(), dgain, dbias, dx_sums, count(blocks), count(dim), flag(accumulate)];
    cuda.launch(&NORM, "norm_backward_sums", Grid::of([dim.div_ceil(32), 3, 1], 1024), &args);
}

/// A kernel for rows of some width.
struct Variant {
    kernel: &'static str,
    /// Threads of a row.
    threads: usize,
    /// Rows that a group of these threads works on at a time.
    rows: usize,
    /// Groups of a block. They share its sums of columns, so that there are fewer to add up in the end.
    groups: usize,
}

impl Variant {
    fn new(dtype: Dtype, dim: usize, aligned: bool) -> Variant {
        let wide = aligned && dim.is_multiple_of(8);
        let threads = dim.div_ceil(if wide { 8 } else { 1 }).next_multiple_of(32);
        // Elements of f32 need twice the registers.
        let most = if dtype == Dtype::F32 { BLOCK / 2 } else { BLOCK };
        let groups = (most / threads).clamp(1, MOST_GROUPS);
        let (kernel, rows, groups) = match (wide, threads) {
            (true, ..=256) => (float_kernel!("norm_backward_4_rows", dtype), 4, groups),
            (true, ..=512) => (float_kernel!("norm_backward_2_rows", dtype), 2, 1),
            (true, ..=1024) if dtype == Dtype::Bf16 => ("norm_backward_1_row_bf16", 1, 1),
            (false, ..=1024) => (float_kernel!("norm_backward_narrow", dtype), 4, 1),
            _ => (float_kernel!("norm_backward_long", dtype), 1, 1),
        };
        Variant { kernel, threads: threads.min(1024), rows, groups }
    }

    /// Blocks that a multiprocessor runs at the same time.
    fn per_processor(&self) -> usize {
        (BLOCK / (self.threads * self.groups)).max(1)
    }
}

fn parameters<'a>(params: NormParams<'a>) -> (View<'a>, Option<View<'a>>) {
    match params {
        NormParams::Layer { gain, bias } => (gain, Some(bias)),
        NormParams::Rms { gain } => (gain, None),
    }
}

fn stats_per_row(layer: bool) -> usize {
    if layer { 2 } else { 1 }
}

/// Checks the parameters and returns the number of rows and their width.
fn shape(x: View<'_>, gain: View<'_>, bias: Option<View<'_>>) -> (usize, usize) {
    let dim = gain.len();
    assert!(
        dim > 0 && x.len().is_multiple_of(dim),
        "{} elements are not a multiple of dim={dim}",
        x.len()
    );
    assert!(
        [Some(gain), bias].iter().flatten().all(|p| p.len() == dim && p.dtype() == x.dtype()),
        "gain {gain:?} and bias {bias:?} of {x:?}"
    );
    (x.len() / dim, dim)
}

fn assert_same<'a>(x: View<'_>, others: impl IntoIterator<Item = View<'a>>) {
    for other in others {
        assert_eq!((x.len(), x.dtype()), (other.len(), other.dtype()), "{x:?} and {other:?}");
    }
}
