//! Products of groups of rows in one launch, on Hopper and in bf16 (`kernels/grouped.cu`). `trial` decides whether the kernel
//! is used.

mod trial;

use lockstep_cuda::{Boxes, TensorMap};

use super::queue::Operation;
use super::{Cuda, Grid, Source};
use crate::device::{GroupedKind, GroupedMatmul, Stack};
use crate::{Dtype, Location};
pub(crate) use trial::Trials;

pub(crate) static GROUPED: Source =
    Source { name: "grouped", code: include_str!("../kernels/grouped.cu") };

/// Sizes of the kernel (`kernels/grouped.cu`): rows and columns of a tile, the part of the inner dimension that a slot of
/// shared memory has, slots, threads.
const TILE_M: usize = 128;
const TILE_N: usize = 256;
const TILE_K: usize = 64;
const SLOTS: usize = 4;
const THREADS: u32 = 384;

/// The parameters of the kernels. The layout is that of `grouped::Work`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Work {
    a: TensorMap,
    b: TensorMap,
    out: u64,
    starts: u64,
    out_stride: i64,
    groups: i32,
    m: i32,
    n: i32,
    k: i32,
    accumulate: i32,
}

/// A grouped product, ready to be enqueued.
pub(crate) struct Launch {
    kernel: &'static str,
    work: Work,
}

impl Launch {
    pub fn enqueue(self, cuda: &Cuda) {
        let Launch { kernel, work } = self;
        let shared = shared_bytes(work.groups as usize);
        let function = cuda.kernels.function(&cuda.context, &GROUPED, kernel);
        let grid = Grid::new(cuda.multiprocessors(), THREADS).shared(shared);
        cuda.push(Operation::Grouped { function, grid, work: Box::new(work) });
    }
}

/// The launch of a product, if the kernel can do it and is used for it. `each` enqueues one product per group.
pub(crate) fn launch(
    cuda: &Cuda,
    work: &GroupedMatmul<'_>,
    each: impl Fn(GroupedMatmul<'_>),
) -> Option<Launch> {
    let fixed = cuda.grouped.fixed();
    if fixed == Some(false) || !fits(cuda, work) {
        return None;
    }
    let used = fixed == Some(true) || trial::is_used(cuda, work, each);
    used.then(|| describe(cuda, work, work.out.address(), work.stack))
}

/// Shared memory of a block: the slots at a multiple of 1,024 bytes, their barriers, and the starts of the groups.
fn shared_bytes(groups: usize) -> usize {
    1024 + SLOTS * (2 * (TILE_M + TILE_N) * TILE_K + 16) + 4 * (groups + 1)
}

/// Whether the kernel can compute a product: on Hopper, in bf16, with rows of a multiple of 16 bytes.
fn fits(cuda: &Cuda, work: &GroupedMatmul<'_>) -> bool {
    let Stack { first, stride, count, rows, cols } = work.stack;
    let is_wide = |elements: usize| elements.is_multiple_of(8);
    let gradient = work.kind == GroupedKind::LinearDw;
    let sizes = [rows, cols, stride, first];
    cuda.context.capability.0 == 9
        && [work.a.dtype(), work.b.dtype()] == [Dtype::Bf16; 2]
        && (work.out.dtype() == Dtype::Bf16 || (gradient && work.out.dtype() == Dtype::F32))
        && sizes.into_iter().all(is_wide)
        && rows * cols > 0
        && work.a.rows() > 0
        && [work.a.address(), work.b.address(), work.out.address()].iter().all(|a| a % 16 == 0)
        && work.a.rows() < i32::MAX as usize
        && work.groups.starts().location() == Location::Device
        && shared_bytes(count) <= cuda.context.shared_per_block
}

/// The parameters of the kernel for a product with another output.
fn describe(cuda: &Cuda, work: &GroupedMatmul<'_>, out: u64, stack: Stack) -> Launch {
    let (rows, [outputs, inputs]) = (work.a.rows(), [work.stack.rows, work.stack.cols]);
    let map = |address, [x, y, z]: [usize; 3], stride: usize, size: [usize; 2]| {
        let boxes = Boxes {
            address,
            dims: [x, y, z].map(|dim| dim as u64),
            strides: [2 * x as u64, 2 * stride as u64],
            size: [size[0] as u32, size[1] as u32, 1],
        };
        TensorMap::new(&cuda.context, &boxes).unwrap_or_else(|error| panic!("{error}"))
    };
    let rows_of = |address, cols, size| map(address, [cols, rows, 1], cols * rows, size);
    let weights = |size| {
        let Stack { first, stride, count, .. } = work.stack;
        map(work.b.address() + 2 * first as u64, [inputs, outputs, count], stride, size)
    };
    // Operands whose rows are along the outer dimension are loaded in pieces of 64 columns.
    let piece = [TILE_K; 2];
    let (a, b) = (work.a.address(), work.b.address());
    let (kernel, maps, [m, n, k]) = match work.kind {
        GroupedKind::Linear => {
            let maps = [rows_of(a, inputs, [TILE_K, TILE_M]), weights([TILE_K, TILE_N])];
            ("grouped_forward", maps, [0, outputs, inputs])
        }
        GroupedKind::LinearDx => {
            let maps = [rows_of(a, outputs, [TILE_K, TILE_M]), weights(piece)];
            ("grouped_input", maps, [0, inputs, outputs])
        }
        GroupedKind::LinearDw => {
            let maps = [rows_of(a, outputs, piece), rows_of(b, inputs, piece)];
            let kernel = match work.out.dtype() {
                Dtype::F32 => "grouped_weight_f32",
                _ => "grouped_weight_bf16",
            };
            (kernel, maps, [outputs, inputs, 0])
        }
    };
    let of_stack = work.kind == GroupedKind::LinearDw;
    let (first, out_stride) = if of_stack { (stack.first, stack.stride as i64) } else { (0, 0) };
    let work = Work {
        a: maps[0],
        b: maps[1],
        out: out + (first * work.out.dtype().bytes()) as u64,
        starts: work.groups.starts().address(),
        out_stride,
        groups: stack.count as i32,
        m: m as i32,
        n: n as i32,
        k: k as i32,
        accumulate: work.accumulate as i32,
    };
    Launch { kernel, work }
}
