//! Calls that fail: the message names the rank and both calls, and appears in time.

use crate::check::open;
use crate::deadline::{Deadline, LIMIT};
use crate::memory::DeviceVec;
use crate::{gpu, open_nccl};
use lockstep_comm::{Cause, DeviceEngine, DeviceSlice, Error, Op, Options, on_threads_with};
use lockstep_cuda::Stream;
use std::time::{Duration, Instant};

fn options() -> Options {
    Options { timeout: Duration::from_secs(2), ..Options::default() }
}

/// Prints the message of each rank and the time until it appeared.
fn report(what: &str, rank: usize, since: Instant, error: &Error) {
    println!("{what}: after {:.2} s: {error}", since.elapsed().as_secs_f64());
    assert!(error.to_string().starts_with(&format!("rank {rank}: ")), "{error}");
}

#[test]
fn mismatched_calls_are_reported_by_all_ranks() {
    let Some(gpu) = gpu("mismatched_calls_are_reported_by_all_ranks") else { return };
    on_threads_with(&options(), 3, |world| {
        let device = open(&world, &gpu, DeviceEngine::Shared);
        let stream = Stream::new(gpu.context.clone());
        let len = if world.rank() == 1 { 200 } else { 100 };
        let x = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; len]);
        let begun = Instant::now();
        let error = device.all_reduce(&stream, x.slice(), x.slice(), Op::Sum).unwrap_err();
        report("mismatched lengths", world.rank(), begun, &error);
        assert_eq!(error.cause(), Some(Cause::Disagreed));
        assert!(error.to_string().contains("f32 × 200"), "{error}");
        stream.synchronize();
    });
}

#[test]
fn host_and_device_calls_do_not_match() {
    let Some(gpu) = gpu("host_and_device_calls_do_not_match") else { return };
    on_threads_with(&options(), 2, |world| {
        let device = open(&world, &gpu, DeviceEngine::Shared);
        let stream = Stream::new(gpu.context.clone());
        let x = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; 10_000]);
        let begun = Instant::now();
        let error = match world.rank() {
            0 => device.all_reduce(&stream, x.slice(), x.slice(), Op::Sum).unwrap_err(),
            _ => world.all_reduce(&mut vec![1.0f32; 10_000], Op::Sum).unwrap_err(),
        };
        report("host and device", world.rank(), begun, &error);
        assert_eq!(error.cause(), Some(Cause::Disagreed));
    });
}

#[test]
fn a_rank_that_never_arrives_is_blamed() {
    let Some(gpu) = gpu("a_rank_that_never_arrives_is_blamed") else { return };
    on_threads_with(&options(), 3, |world| {
        let device = open(&world, &gpu, DeviceEngine::Shared);
        let stream = Stream::new(gpu.context.clone());
        let x = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; 1000]);
        let begun = Instant::now();
        if world.rank() == 2 {
            std::thread::sleep(Duration::from_secs(4));
            return;
        }
        let error = device.all_reduce(&stream, x.slice(), x.slice(), Op::Sum).unwrap_err();
        report("never arrives", world.rank(), begun, &error);
        assert_eq!((error.culprit(), error.cause()), (Some(2), Some(Cause::Late)));
        stream.synchronize();
    });
}

/// The same failures of calls that NCCL performs: the calls are enqueued, and the stream is released when they are aborted.
#[test]
fn failures_of_nccl_are_reported_by_all_ranks() {
    let test = "failures_of_nccl_are_reported_by_all_ranks";
    let Some(gpu) = gpu(test) else { return };
    let deadline = Deadline::start(test, LIMIT);
    for case in ["mismatched lengths", "never arrives"] {
        on_threads_with(&options(), 2, |world| {
            deadline.step(world.rank(), case);
            let Some(device) = open_nccl(&world, &gpu) else { return };
            let stream = Stream::new(gpu.context.clone());
            let x = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; 2_000_000]);
            device.all_reduce(&stream, x.slice(), x.slice(), Op::Max).unwrap();
            stream.synchronize();
            world.barrier().unwrap();
            let begun = Instant::now();
            if case == "never arrives" && world.rank() == 1 {
                return std::thread::sleep(Duration::from_secs(4));
            }
            // A call of a new length is compared before it is enqueued; the others wait on the GPU.
            let mismatched = case == "mismatched lengths" && world.rank() == 0;
            let (x, len) = (x.slice(), if mismatched { 1_000_000 } else { 2_000_000 });
            // SAFETY: a part of the vector.
            let part = unsafe { DeviceSlice::new(x.address(), len, x.dtype()) };
            let mut result = device.all_reduce(&stream, part, part, Op::Max);
            stream.synchronize();
            if result.is_ok() {
                result = world.barrier();
            }
            let error = result.unwrap_err();
            report(&format!("nccl, {case}"), world.rank(), begun, &error);
        });
    }
}

#[test]
fn a_missing_nccl_says_what_to_install() {
    let Some(gpu) = gpu("a_missing_nccl_says_what_to_install") else { return };
    if std::env::var_os("LOCKSTEP_WITHOUT_NCCL").is_none() {
        return println!("skipped: set LOCKSTEP_WITHOUT_NCCL where NCCL is not installed");
    }
    let errors = lockstep_comm::on_threads(2, |world| {
        world.open_device(Some(&gpu), DeviceEngine::Nccl).unwrap_err().to_string()
    });
    println!("{}", errors[0]);
    assert!(errors.iter().all(|error| error.contains("pip install nvidia-nccl")), "{errors:?}");
}
