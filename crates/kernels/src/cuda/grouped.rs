//! Products of groups of rows in one launch, on Hopper and in bf16 (`kernels/grouped.cu`). Whether that is faster than a
//! cuBLASLt product per group depends on their number and size, so it is measured once per problem and GPU, as the
//! algorithms of cuBLASLt are. The measurement also compares the results: a kernel that is wrong on a GPU is not used there.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use lockstep_cuda::{Boxes, TensorMap, cache};

use super::queue::Operation;
use super::{Arg, Cuda, Grid, Source};
use crate::device::{GroupedKind, GroupedMatmul, Stack};
use crate::memory::Extent;
use crate::{Dtype, Location, ViewMut};

pub(crate) static GROUPED: Source =
    Source { name: "grouped", code: include_str!("kernels/grouped.cu") };

/// Sizes of the kernel (`kernels/grouped.cu`): rows and columns of a tile, the part of the inner dimension that a stage of
/// shared memory has, stages, threads.
const TILE_M: usize = 128;
const TILE_N: usize = 256;
const TILE_K: usize = 64;
const STAGES: usize = 4;
const THREADS: u32 = 384;

/// Timed repetitions in a round.
const REPETITIONS: usize = 5;

/// Rounds, of which the fastest counts.
const ROUNDS: usize = 3;

/// Fewer multiply-adds per group take microseconds, less than it takes to start one product after the other.
const SHORT: usize = 1 << 23;

/// The largest difference between results, as a part of the largest number: some roundings of bf16.
const TOLERANCE: f32 = 1.0 / 64.0;

/// Which problems use the grouped kernel.
#[derive(Default)]
pub(crate) struct Grouped {
    /// 0: measured, 1: never, 2: always.
    fixed: AtomicU8,
    decided: Mutex<HashMap<Class, bool>>,
}

impl Grouped {
    pub fn set(&self, on: Option<bool>) {
        self.fixed.store(on.map_or(0, |on| 1 + on as u8), Relaxed);
    }
}

/// Problems that are measured once: all numbers of rows up to a power of two.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Class {
    kind: GroupedKind,
    rows: usize,
    stack: [usize; 3],
    output: Dtype,
    accumulate: bool,
}

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
    let fixed = cuda.grouped.fixed.load(Relaxed);
    if fixed == 1 || !fits(cuda, work) {
        return None;
    }
    let used = fixed == 2 || is_used(cuda, work, each);
    used.then(|| describe(cuda, work, work.out.address(), work.stack))
}

/// Shared memory of a block: the stages at a multiple of 1,024 bytes, their barriers, and the starts of the groups.
fn shared_bytes(groups: usize) -> usize {
    1024 + STAGES * (2 * (TILE_M + TILE_N) * TILE_K + 16) + 4 * (groups + 1)
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

/// Whether the kernel is used for the problems of a class.
fn is_used(cuda: &Cuda, work: &GroupedMatmul<'_>, each: impl Fn(GroupedMatmul<'_>)) -> bool {
    let Stack { count, rows, cols, .. } = work.stack;
    let class = Class {
        kind: work.kind,
        rows: work.a.rows().next_power_of_two(),
        stack: [count, rows, cols],
        output: work.out.dtype(),
        accumulate: work.accumulate,
    };
    let decided = || cuda.grouped.decided.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(used) = decided().get(&class) {
        return *used;
    }
    let text = class.text();
    let stored = cuda.blaslt.stored(&text).or_else(|| {
        let better = is_better(cuda, work, each)?;
        Some(cuda.blaslt.agree(text, [better as u64, 0, 0, 0, 0, 0, 0, 0]))
    });
    // Not measured now, for example because memory was short: the next product tries again.
    let Some(words) = stored else { return false };
    let used = words[0] == 1;
    decided().insert(class, used);
    used
}

impl Class {
    /// One line that identifies the class and the version of the kernel.
    fn text(&self) -> String {
        let Class { kind, rows, stack: [count, outputs, inputs], output, accumulate } = self;
        let version = cache::key(&[GROUPED.code]);
        let add = if *accumulate { " add" } else { "" };
        format!("grouped {kind:?} {rows} {count}x{outputs}x{inputs} {output}{add} {version:x}")
    }
}

/// Whether the kernel computes the same as one product per group, in less time. None if that cannot be measured now.
fn is_better(
    cuda: &Cuda,
    work: &GroupedMatmul<'_>,
    each: impl Fn(GroupedMatmul<'_>),
) -> Option<bool> {
    let dtype = work.out.dtype();
    // Gradients of the trials are adjacent.
    let adjacent = Stack { first: 0, stride: work.stack.rows * work.stack.cols, ..work.stack };
    let (len, stack) = match work.kind {
        GroupedKind::Linear | GroupedKind::LinearDx => (work.out.len(), work.stack),
        GroupedKind::LinearDw => (adjacent.stride * adjacent.count, adjacent),
    };
    let allocate = |bytes| {
        let buffer = cuda.buffer(bytes, "the trial of a grouped product").ok()?;
        cuda.memset(buffer.address, 0, bytes);
        Some(buffer)
    };
    let bytes = len * dtype.bytes();
    let (grouped, single, found) = (allocate(bytes)?, allocate(bytes)?, allocate(8)?);
    let cols = work.out.cols();
    let [rows, cols] = if len == work.out.len() { [len / cols, cols] } else { [1, len] };
    let extent = Extent { rows, cols, dtype, location: Location::Device };
    let run = |is_grouped: bool| {
        if is_grouped {
            return describe(cuda, work, grouped.address, stack).enqueue(cuda);
        }
        // SAFETY: the buffer has this extent, lives until the trial ends, and has no other view.
        let out = unsafe { ViewMut::new(single.address as *mut u8, extent) };
        each(work.with_output(out, stack));
    };
    [true, false].into_iter().for_each(run);
    let kernel = match dtype {
        Dtype::F32 => "grouped_compare_f32",
        _ => "grouped_compare_bf16",
    };
    let args =
        [grouped.address, single.address].map(Arg::from).into_iter().chain([Arg::from(len as i64)]);
    let args: Vec<Arg> = args.chain([Arg::from(found.address)]).collect();
    cuda.launch_now(&GROUPED, kernel, Grid::new(4 * cuda.multiprocessors(), 256), &args);
    let mut bits = [0; 8];
    cuda.read(found.address, &mut bits);
    let float = |at: usize| f32::from_ne_bytes(std::array::from_fn(|i| bits[at + i]));
    let (difference, largest) = (float(0), float(4));
    if !largest.is_finite() {
        return None;
    }
    if difference > TOLERANCE * largest {
        eprintln!(
            "warning: the grouped product of this GPU differs from cuBLASLt's by {difference:e} ({:?}, {:?}); \
             experts are multiplied one by one",
            work.kind, work.stack
        );
        return Some(false);
    }
    if work.a.rows() / work.stack.count * work.stack.rows * work.stack.cols < SHORT {
        return Some(true);
    }
    let time = |is_grouped: bool| {
        let start = cuda.record();
        (0..REPETITIONS).for_each(|_| run(is_grouped));
        cuda.record().elapsed_since(&start)
    };
    let rounds: Vec<_> = (0..ROUNDS).map(|_| [true, false].map(time)).collect();
    let fastest = |which: usize| rounds.iter().map(|times| times[which]).min();
    Some(fastest(0) < fastest(1))
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
