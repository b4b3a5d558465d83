//! Whether the grouped kernel is used. One launch or a cuBLASLt product per group: which is faster depends on their number and
//! size, so it is measured once per problem and GPU, as the algorithms of cuBLASLt are. The measurement also compares the
//! results: a kernel that is wrong on a GPU is not used there.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use lockstep_cuda::{Arena, cache};

use super::{GROUPED, describe};
use crate::cuda::{Arg, Cuda, Grid};
use crate::device::{GroupedKind, GroupedMatmul, Stack};
use crate::memory::Extent;
use crate::{Dtype, Location, ViewMut};

/// Timed repetitions in a round.
const REPETITIONS: usize = 5;

/// Rounds, of which the fastest counts.
const ROUNDS: usize = 3;

/// Fewer multiply-adds per group take microseconds, less than it takes to start one product after the other.
const SHORT: usize = 1 << 23;

/// The largest difference between results, as a part of the largest number: some roundings of bf16.
const TOLERANCE: f32 = 1.0 / 64.0;

/// Which problems use the kernel.
#[derive(Default)]
pub(crate) struct Trials {
    /// 0: measured, 1: never, 2: always.
    fixed: AtomicU8,
    decided: Mutex<HashMap<Class, bool>>,
}

impl Trials {
    pub fn set(&self, on: Option<bool>) {
        self.fixed.store(on.map_or(0, |on| 1 + on as u8), Relaxed);
    }

    /// Whether the kernel is always or never used; `None`: measured.
    pub fn fixed(&self) -> Option<bool> {
        let fixed = self.fixed.load(Relaxed);
        (fixed > 0).then_some(fixed == 2)
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

/// Whether the kernel is used for the problems of a class.
pub(super) fn is_used(
    cuda: &Cuda,
    work: &GroupedMatmul<'_>,
    each: impl Fn(GroupedMatmul<'_>),
) -> bool {
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
    // What could not be measured, for example because memory is short, is not used in this process.
    let used = stored.is_some_and(|words| words[0] == 1);
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

/// Whether the kernel computes the same as one product per group, in less time. None if that cannot be measured.
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
    // Both results and what their comparison finds.
    let bytes = (len * dtype.bytes()).next_multiple_of(256);
    let memory = Arena::of(cuda.context.clone(), 2 * bytes + 8)?;
    cuda.memset(memory.start(), 0, 2 * bytes + 8);
    let [grouped, single, found] = [0, 1, 2].map(|i| memory.start() + (i * bytes) as u64);
    let cols = work.out.cols();
    let [rows, cols] = if len == work.out.len() { [len / cols, cols] } else { [1, len] };
    let extent = Extent { rows, cols, dtype, location: Location::Device };
    let run = |is_grouped: bool| {
        if is_grouped {
            return describe(cuda, work, grouped, stack).enqueue(cuda);
        }
        // SAFETY: the memory has room for this extent, lives until the trial ends, and this is its only view.
        let out = unsafe { ViewMut::new(single as *mut u8, extent) };
        each(work.with_output(out, stack));
    };
    [true, false].into_iter().for_each(run);
    let kernel = match dtype {
        Dtype::F32 => "grouped_compare_f32",
        _ => "grouped_compare_bf16",
    };
    let args = [single, grouped].map(Arg::from).into_iter().chain([Arg::from(len as i64)]);
    let args: Vec<Arg> = args.chain([Arg::from(found)]).collect();
    cuda.launch_now(&GROUPED, kernel, Grid::new(4 * cuda.multiprocessors(), 256), &args);
    let mut bits = [0; 8];
    cuda.read(found, &mut bits);
    let float = |at: usize| f32::from_ne_bytes(std::array::from_fn(|i| bits[at + i]));
    let (difference, largest) = (float(0), float(4));
    // Zeros and numbers that are not finite say nothing about the kernel.
    if largest == 0.0 || !largest.is_finite() {
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
