//! Casts to fp8.

use super::elementwise::{THREADS, count};
use super::reduce::add_parts;
use super::{Arg, Cuda, DeviceBuffer, Grid, Source};
use crate::{Dtype, Fp8Cast, Fp8Format, Fp8Source, View, ViewMut};

pub(crate) const FP8: Source = Source {
    name: "fp8",
    code: concat!(include_str!("kernels/activation.cuh"), "\n", include_str!("kernels/fp8.cu")),
};

/// The oldest compute capability with fp8.
const OLDEST_CAPABILITY: (i32, i32) = (8, 9);

/// Rows and columns of a block's tile.
const TILE: usize = 128;

/// Blocks per multiprocessor that compute the scale of a matrix.
const AMAX_BLOCKS: usize = 8;

impl Cuda {
    pub fn has_fp8(&self) -> bool {
        self.context.capability >= OLDEST_CAPABILITY
    }

    /// The state of `amax` kernels, which is zero between them.
    fn amax_state(&self) -> &DeviceBuffer {
        self.amax_state.get_or_init(|| {
            let buffer = self.buffer(8, "the state of fp8 scales");
            let buffer = buffer.unwrap_or_else(|error| panic!("{error}"));
            self.memset(buffer.address, 0, buffer.bytes);
            buffer
        })
    }
}

/// Casts a matrix into the plain and the transposed copy, and stores the inverse of its scale and the scale.
pub(crate) fn cast(
    cuda: &Cuda,
    cast: Fp8Cast<'_>,
    [plain, transposed]: [Option<ViewMut<'_>>; 2],
    scale: ViewMut<'_>,
) {
    let Fp8Cast { from, format, column_sums, .. } = cast;
    let (rows, cols) = from.shape();
    if rows * cols == 0 {
        return;
    }
    let (x, d) = from.operands();
    for view in [Some(x), d].into_iter().flatten() {
        assert_eq!(view.dtype(), Dtype::Bf16, "cast of {view:?} to fp8");
        assert!(view.address().is_multiple_of(16), "{view:?} is not aligned to 16 bytes");
    }
    let inputs = [x.into(), Arg::from(d.map_or(0, |d| d.address()))];
    let amax = match from {
        Fp8Source::Whole(_) => "amax_whole",
        Fp8Source::Gelu(_) => "amax_gelu",
        Fp8Source::GeluGradient { .. } => "amax_gelu_gradient",
        Fp8Source::Swiglu(_) => "amax_swiglu",
    };
    let most = cuda.multiprocessors() * AMAX_BLOCKS;
    let blocks = (rows * cols).div_ceil(THREADS as usize * 8 * 4).min(most);
    let [a, b] = inputs;
    let state = Arg::from(cuda.amax_state().address);
    let args = [a, b, state, (&scale).into(), format.max().into(), count(rows), count(cols)];
    cuda.launch(&FP8, amax, Grid::new(blocks, THREADS), &args);

    let kernel = match (format, from) {
        (Fp8Format::E4m3, Fp8Source::Whole(_)) => "e4m3_whole",
        (Fp8Format::E4m3, Fp8Source::Gelu(_)) => "e4m3_gelu",
        (Fp8Format::E4m3, Fp8Source::Swiglu(_)) => "e4m3_swiglu",
        (Fp8Format::E5m2, Fp8Source::Whole(_)) => "e5m2_whole",
        (Fp8Format::E5m2, Fp8Source::GeluGradient { .. }) => "e5m2_gelu_gradient",
        (format, from) => panic!("no cast of {from:?} to {format:?}"),
    };
    let (across, down) = (cols.div_ceil(TILE), rows.div_ceil(TILE));
    assert!(down < 1 << 16, "{rows} rows exceed the size of a grid");
    let address = |to: Option<ViewMut<'_>>| Arg::from(to.map_or(0, |to| to.address()));
    let scratch = cuda.scratch(if column_sums.is_some() { 4 * down * cols } else { 0 });
    let sums = Arg::from(if column_sums.is_some() { scratch.address() } else { 0 });
    let (plain, transposed, no_amax) = (address(plain), address(transposed), Arg::from(0u64));
    let scale = Arg::from(&scale);
    let args = [a, b, scale, plain, transposed, no_amax, sums, count(rows), count(cols)];
    cuda.launch(&FP8, kernel, Grid::of([across, down, 1], THREADS), &args);
    if let Some((to, accumulate)) = column_sums {
        assert_eq!((to.dtype(), to.len()), (Dtype::F32, cols), "column sums into {to:?}");
        add_parts(cuda, scratch.address(), [1, down, cols], to.address(), accumulate);
    }
}

/// Addresses of the inverse scales of a multiply's operands. cuBLASLt reads them from aligned addresses only.
pub(crate) fn inverse_scales(scales: [View<'_>; 2]) -> [u64; 2] {
    scales.map(|scale| scale.address())
}
