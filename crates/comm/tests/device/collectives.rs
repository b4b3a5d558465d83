//! Engines × collectives × types × operators × 1–8 ranks × lengths × alignments.

use crate::check::{check_lengths, open};
use crate::deadline::Deadline;
use crate::memory::DeviceVec;
use crate::processes::{on_processes, shared_memory};
use crate::{gpu, open_nccl};
use lockstep_comm::{DeviceEngine, Op, on_threads};
use lockstep_cuda::Stream;
use std::time::Duration;

const LENGTHS: [usize; 6] = [0, 1, 7, 64, 4099, 70_000];

#[test]
fn collectives_of_threads_on_one_gpu_equal_those_of_the_host() {
    let Some(gpu) = gpu("collectives_of_threads_on_one_gpu") else { return };
    for ranks in 1..=8 {
        on_threads(ranks, |world| check_lengths(&world, &gpu, DeviceEngine::Shared, &LENGTHS));
        println!("shared, threads: {ranks} ranks are exact");
    }
}

/// Without MPS, the GPU switches between the processes in time slices, so there are few lengths.
#[test]
fn collectives_of_processes_on_one_gpu_equal_those_of_the_host() {
    let Some(gpu) = gpu("collectives_of_processes_on_one_gpu") else { return };
    let test = "collectives::collectives_of_processes_on_one_gpu_equal_those_of_the_host";
    for ranks in [2, 4] {
        let begun = std::time::Instant::now();
        on_processes(test, &format!("{ranks}"), shared_memory(ranks), |world| {
            check_lengths(&world, &gpu, DeviceEngine::Shared, &[0, 7, 70_001]);
        });
        println!("shared, {ranks} processes are exact, {:.1} s", begun.elapsed().as_secs_f64());
    }
}

/// Needs NCCL 2.30 or newer and `NCCL_MULTI_RANK_GPU_ENABLE=1`.
#[test]
fn collectives_of_nccl_on_one_gpu_equal_those_of_the_host() {
    let test = "collectives_of_nccl_on_one_gpu_equal_those_of_the_host";
    let Some(gpu) = gpu(test) else { return };
    let deadline = Deadline::start(test, Duration::from_secs(300));
    for ranks in [1, 2, 3, 4, 8] {
        on_threads(ranks, |world| {
            deadline.step(world.rank(), format!("{ranks} ranks"));
            if open_nccl(&world, &gpu).is_none() {
                return;
            }
            check_lengths(&world, &gpu, DeviceEngine::Nccl, &LENGTHS);
            println!("nccl, threads: rank {} of {ranks} is exact", world.rank());
        });
    }
}

/// Calls follow each other without the host waiting for any: every call sees the result of the one before.
#[test]
fn calls_are_ordered_on_the_stream() {
    let Some(gpu) = gpu("calls_are_ordered_on_the_stream") else { return };
    on_threads(4, |world| {
        let device = open(&world, &gpu, DeviceEngine::Auto);
        assert_eq!(device.engine(), DeviceEngine::Shared);
        let stream = Stream::new(gpu.context.clone());
        let x = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; 100_000]);
        // Powers of two: exact.
        for _ in 0..50 {
            device.all_reduce(&stream, x.slice(), x.slice(), Op::Sum).unwrap();
            device.all_reduce(&stream, x.slice(), x.slice(), Op::Mean).unwrap();
        }
        assert_eq!(x.read(&stream), vec![4f32.powi(50); 100_000]);
    });
}
