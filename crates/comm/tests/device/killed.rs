//! A rank that is killed inside a collective on device memory: the survivors name it.

use crate::check::open;
use crate::gpu;
use crate::memory::DeviceVec;
use crate::processes::shared_memory;
use crate::ranks::{TestRank, options, spawn};
use lockstep_comm::{Cause, DeviceEngine, Error, Op, Options};
use lockstep_cuda::{Gpu, Stream};
use std::time::{Duration, Instant};

/// All-reduces until a call fails. The GPU is synchronized after every call, so that the host is inside a call or waits for
/// one.
fn call_forever(rank: &TestRank, gpu: &Gpu, engine: DeviceEngine) -> Result<(), Error> {
    let world = rank.join()?;
    let device = open(&world, gpu, engine);
    let stream = Stream::new(gpu.context.clone());
    let x = DeviceVec::new(gpu, &stream, 0, &vec![0.0f32; 1 << 20]);
    rank.mark("joined");
    loop {
        device.all_reduce(&stream, x.slice(), x.slice(), Op::Sum)?;
        stream.synchronize();
    }
}

fn check(test: &str, engine: DeviceEngine) {
    let Some(gpu) = gpu(test) else { return };
    let limits = Options { heartbeat: Duration::from_secs(2), ..options() };
    let rank = |rank: &TestRank| call_forever(rank, &gpu, engine);
    let Some(mut ranks) = spawn(test, engine.name(), shared_memory(3), limits, rank) else {
        return;
    };
    ranks.wait_for_mark("joined", 0..3);
    std::thread::sleep(Duration::from_millis(300));
    let begun = Instant::now();
    ranks.signal(2, libc::SIGKILL);
    for survivor in [0, 1] {
        let error = ranks.error(survivor);
        println!("{}: after {:.2} s: {}", engine.name(), begun.elapsed().as_secs_f64(), error.text);
        assert_eq!((error.culprit, error.cause), (Some(2), Some(Cause::Died)), "{error:?}");
    }
}

#[test]
fn a_process_killed_in_a_collective_is_named() {
    check("killed::a_process_killed_in_a_collective_is_named", DeviceEngine::Shared);
}

/// Needs NCCL 2.30 or newer and `NCCL_MULTI_RANK_GPU_ENABLE=1`.
#[test]
fn a_process_killed_in_nccl_is_named() {
    if std::env::var_os("NCCL_MULTI_RANK_GPU_ENABLE").is_none() {
        return println!("skipped: set NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer");
    }
    check("killed::a_process_killed_in_nccl_is_named", DeviceEngine::Nccl);
}
