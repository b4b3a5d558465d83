//! Casts to fp8.

use super::elementwise::{THREADS, count, small};
use super::reduce::add_parts;
use super::{Arg, Cuda, DeviceBuffer, Grid, Source};
use crate::device::SlotPlace;
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

/// Casts a matrix into the plain and the transposed copy, with the scale of its slot if that has one. Stores the inverse
/// of the scale, and the scale.
pub(crate) fn cast(
    cuda: &Cuda,
    cast: Fp8Cast<'_>,
    [plain, transposed]: [Option<ViewMut<'_>>; 2],
    scale: ViewMut<'_>,
    slot: Option<SlotPlace>,
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
    let [a, b] = inputs;
    let slot_address = slot.as_ref().map_or(0, |slot| slot.address);
    let ready = slot.is_some_and(|slot| slot.ready);
    if !ready {
        let most = cuda.multiprocessors() * AMAX_BLOCKS;
        let blocks = (rows * cols).div_ceil(THREADS as usize * 8 * 4).min(most);
        let state = Arg::from(cuda.amax_state().address);
        let args = [a, b, state, (&scale).into(), format.max().into(), count(rows), count(cols)];
        cuda.launch(&FP8, amax, Grid::new(blocks, THREADS), &args);
    }

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
    let (plain, transposed) = (address(plain), address(transposed));
    let (own, amax) = (scale.address(), if slot_address == 0 { 0 } else { slot_address + 8 });
    let (from, used) = if ready { (slot_address, own) } else { (own, 0) };
    let (from, used, amax) = (Arg::from(from), Arg::from(used), Arg::from(amax));
    let args = [a, b, from, plain, transposed, used, amax, sums, count(rows), count(cols)];
    cuda.launch(&FP8, kernel, Grid::of([across, down, 1], THREADS), &args);
    if let Some((to, accumulate)) = column_sums {
        assert_eq!((to.dtype(), to.len()), (Dtype::F32, cols), "column sums into {to:?}");
        add_parts(cuda, scratch.address(), [1, down, cols], to.address(), accumulate);
    }
}

/// The scales of the next step from a table of slots.
pub(crate) fn next_scales(cuda: &Cuda, slots: ViewMut<'_>, at: usize) {
    let rows = slots.rows();
    let args = [slots.into(), small(at), count(rows)];
    cuda.launch(&FP8, "next_scales", Grid::over(rows, THREADS), &args);
}

/// Addresses of the inverse scales of a multiply's operands. cuBLASLt reads them from aligned addresses only.
pub(crate) fn inverse_scales(scales: [View<'_>; 2]) -> [u64; 2] {
    scales.map(|scale| scale.address())
}
