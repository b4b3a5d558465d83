//! Starts the kernels of `collectives.cu`.

use super::work::{Copy, Reduction, Work};
use crate::call::fold::Op;
use lockstep_cuda::{Gpu, Grid, Source, Stream};
use lockstep_types::Dtype;

pub(crate) static COLLECTIVES: Source =
    Source { name: "collectives", code: include_str!("collectives.cu") };

/// Limits of `collectives.cu`. More copies than these take several launches.
pub(crate) const MAX_MEMBERS: usize = 32;
const MAX_COPIES: usize = 64;
const MAX_TARGETS: usize = 192;

/// `Reduction` of `collectives.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ReductionArgs {
    inputs: [u64; MAX_MEMBERS],
    outputs: [u64; MAX_MEMBERS],
    start: [u64; MAX_MEMBERS],
    count: [u64; MAX_MEMBERS],
    aligned: u32,
    members: u32,
    outputs_per_job: u32,
    op: u32,
}

/// `Copies` of `collectives.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct CopiesArgs {
    sources: [u64; MAX_COPIES],
    bytes: [u64; MAX_COPIES],
    targets: [u64; MAX_TARGETS],
    first_target: [u16; MAX_COPIES + 2],
}

const THREADS: u32 = 256;

/// Enqueues the work on a stream.
pub(crate) fn launch(gpu: &Gpu, stream: &Stream, dtype: Dtype, work: &Work) {
    match work {
        Work::Reduce { inputs, op, jobs } => reduce(gpu, stream, dtype, inputs, *op, jobs),
        Work::Copy(copies) => batches(copies).for_each(|batch| copy(gpu, stream, batch)),
    }
}

fn reduce(gpu: &Gpu, stream: &Stream, dtype: Dtype, inputs: &[u64], op: Op, jobs: &[Reduction]) {
    let Some(first) = jobs.first() else { return };
    let (width, outputs_per_job) = (dtype.bytes() as u64, first.outputs.len());
    let mut args = ReductionArgs {
        inputs: [0; MAX_MEMBERS],
        outputs: [0; MAX_MEMBERS],
        start: [0; MAX_MEMBERS],
        count: [0; MAX_MEMBERS],
        aligned: 0,
        members: inputs.len() as u32,
        outputs_per_job: outputs_per_job as u32,
        op: op as u32,
    };
    args.inputs[..inputs.len()].copy_from_slice(inputs);
    for (j, job) in jobs.iter().enumerate() {
        args.outputs[j * outputs_per_job..][..outputs_per_job].copy_from_slice(&job.outputs);
        (args.start[j], args.count[j]) = (job.start as u64, job.count as u64);
        let offset = job.start as u64 * width;
        let mut addresses = inputs.iter().map(|i| i + offset).chain(job.outputs.iter().copied());
        args.aligned |= u32::from(addresses.all(|a| a % 16 == 0)) << j;
    }
    let longest = jobs.iter().map(|job| job.count).max().unwrap_or(0);
    let grid = grid(gpu, longest * dtype.bytes(), jobs.len());
    // SAFETY: the layout of the kernel's parameter.
    unsafe { gpu.kernels.launch_with(stream, &COLLECTIVES, kernel(dtype), grid, &args) };
}

fn kernel(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "reduce_f32",
        Dtype::F64 => "reduce_f64",
        Dtype::F16 => "reduce_f16",
        Dtype::Bf16 => "reduce_bf16",
        Dtype::I32 => "reduce_i32",
        Dtype::I64 => "reduce_i64",
        Dtype::U8 => "reduce_u8",
        Dtype::U32 => "reduce_u32",
    }
}

fn copy(gpu: &Gpu, stream: &Stream, copies: &[Copy]) {
    let mut args = CopiesArgs {
        sources: [0; MAX_COPIES],
        bytes: [0; MAX_COPIES],
        targets: [0; MAX_TARGETS],
        first_target: [0; MAX_COPIES + 2],
    };
    let mut targets = 0;
    for (c, copy) in copies.iter().enumerate() {
        (args.sources[c], args.bytes[c]) = (copy.source, copy.bytes as u64);
        args.targets[targets..][..copy.targets.len()].copy_from_slice(&copy.targets);
        targets += copy.targets.len();
        args.first_target[c + 1] = targets as u16;
    }
    let longest = copies.iter().map(|copy| copy.bytes).max().unwrap_or(0);
    let grid = grid(gpu, longest, copies.len());
    // SAFETY: the layout of the kernel's parameter.
    unsafe { gpu.kernels.launch_with(stream, &COLLECTIVES, "copy", grid, &args) };
}

/// Blocks for `jobs` jobs, the longest of `bytes` bytes: enough to use the memory's bandwidth.
fn grid(gpu: &Gpu, bytes: usize, jobs: usize) -> Grid {
    let needed = bytes.div_ceil(16 * THREADS as usize).max(1);
    let most = (gpu.context.multiprocessors * 8).div_ceil(jobs.max(1));
    Grid::of([needed.min(most), jobs, 1], THREADS)
}

/// Copies in groups that one launch can take.
fn batches(copies: &[Copy]) -> impl Iterator<Item = &[Copy]> {
    let mut rest = copies;
    std::iter::from_fn(move || {
        let mut targets = 0;
        let fits = |copy: &&Copy| {
            targets += copy.targets.len();
            targets <= MAX_TARGETS
        };
        let count = rest.iter().take(MAX_COPIES).take_while(fits).count();
        let (batch, others) = rest.split_at(count);
        rest = others;
        (!batch.is_empty()).then_some(batch)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_split_into_launches() {
        let copy = |targets: usize| Copy { source: 1, bytes: 1, targets: vec![2; targets] };
        let split = |copies: &[Copy]| batches(copies).map(<[Copy]>::len).collect::<Vec<_>>();
        assert!(split(&[]).is_empty());
        assert_eq!(split(&vec![copy(1); 100]), [64, 36]);
        assert_eq!(split(&vec![copy(32); 8]), [6, 2]);
    }

    /// Needs NVRTC, but no GPU. Where it is not installed, the test passes with a note, unless `LOCKSTEP_NEED_NVRTC` is
    /// set.
    #[test]
    fn every_kernel_compiles_for_all_architectures_without_spills() {
        if let Err(error) = lockstep_cuda::Nvrtc::load()
            && std::env::var_os("LOCKSTEP_NEED_NVRTC").is_none()
        {
            return eprintln!("skipped: {error}");
        }
        lockstep_cuda::check_compiles(&[&COLLECTIVES]).unwrap_or_else(|e| panic!("{e}"));
    }
}
