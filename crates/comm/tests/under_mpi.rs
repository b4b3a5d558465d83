//! The suite under an MPI launcher: `mpirun -n 4 under_mpi CASE`. Has no test harness, because all ranks must
//! run the same case and a process joins only once. `scripts/test-mpi.sh` runs all cases and checks the
//! output.

#[path = "suite/check.rs"]
#[allow(dead_code, reason = "only some helpers of the suite apply to engines")]
mod check;
#[path = "device/check.rs"]
mod device;
#[path = "device/memory.rs"]
mod memory;
#[path = "suite/reference.rs"]
mod reference;

use check::{check, check_types};
use half::bf16;
use lockstep_comm::{Algo, Cause, DeviceEngine, Error, Group, Op, Options, World};
use lockstep_cuda::{Gpu, Stream};
use memory::DeviceVec;
use mpi::ffi;
use std::time::{Duration, Instant};

/// The rank that fails.
const VICTIM: usize = 2;

fn main() {
    let case = std::env::args().nth(1).unwrap_or_default();
    let rank: fn(World) = match case.as_str() {
        "collectives" => collectives,
        "groups" => groups,
        "numbers" => numbers,
        "disagreement" => disagreement,
        "messages-disagree" => messages_disagree,
        "counts-disagree" => counts_disagree,
        "late" => late,
        "left" => left,
        "stopped" => stopped,
        "killed" => killed,
        "device" => on_device,
        "device-disagreement" => device_disagreement,
        "device-killed" => device_killed,
        "overhead" => overhead,
        // `cargo test` runs every test binary; without a launcher there is nothing to test.
        _ => return println!("skipped; scripts/test-mpi.sh runs this with mpirun"),
    };
    let options = Options {
        heartbeat: Duration::from_secs(2),
        timeout: Duration::from_secs(if case == "late" { 3 } else { 60 }),
        ..Options::default()
    };
    let world = World::join_mpi(&options).expect("the world starts");
    rank(world);
}

/// Every collective on groups of every size.
fn collectives(world: World) {
    for size in 1..=world.size() {
        let color = (world.rank() < size).then_some(0);
        let group = world.split(color, 0, &format!("first {size}")).unwrap();
        if let Some(group) = group {
            check_types(&group, &[0, 1, 7, 4099], Algo::Engine);
            check::<f32>(&group, 1 << 20, Algo::Engine);
        }
    }
    pass(&world);
}

/// Split, subgroup, symmetric buffers, and started calls on several groups.
fn groups(world: World) {
    let (me, n) = (world.rank(), world.size());
    let backwards = world.split(Some((me % 2) as i64), -(me as i64), "backwards").unwrap().unwrap();
    let mut want: Vec<usize> = (0..n).filter(|r| r % 2 == me % 2).collect();
    want.reverse();
    assert_eq!(backwards.members(), want);
    check::<bf16>(&backwards, 33, Algo::Engine);

    let outer = world.subgroup(if me == 1 || me == 0 { &[1, 0] } else { &[] }, "outer").unwrap();
    assert_eq!(outer.is_some(), me < 2);
    if let Some(outer) = outer {
        assert_eq!(outer.members(), [1, 0]);
        check::<i32>(&outer, 7, Algo::Engine);
    }

    let mut shared = world.symmetric::<f32>(5000).unwrap();
    shared.fill(me as f32);
    world.all_reduce(&mut shared, Op::Sum).unwrap();
    assert!(shared.iter().all(|x| *x == (0..n).sum::<usize>() as f32));

    let started: Vec<_> = (0..20)
        .map(|i| {
            let group: &Group = if i % 2 == 0 { &world } else { &backwards };
            (group.size(), group.start_all_reduce(vec![i as f32; 10_000], Op::Sum))
        })
        .collect();
    for (i, (size, pending)) in started.into_iter().enumerate() {
        assert_eq!(pending.wait().unwrap(), vec![(i * size) as f32; 10_000]);
    }

    let forced = world.with_algo(Some(Algo::Ring)).all_reduce(&mut [0.0f32], Op::Sum);
    assert!(matches!(forced, Err(Error::Misuse { .. })), "{forced:?}");
    pass(&world);
}

/// Every collective and messages on device memory, on groups of every size.
fn on_device(world: World) {
    let gpu = Gpu::open(0).expect("a GPU");
    for size in 1..=world.size() {
        let color = (world.rank() < size).then_some(0);
        let group = world.split(color, 0, &format!("first {size}")).unwrap();
        if let Some(group) = group {
            device::check_lengths(&group, &gpu, DeviceEngine::Mpi, &[0, 1, 7, 4099]);
        }
    }
    device::check_ring(&world, &gpu, DeviceEngine::Mpi);

    // Contributions are added in the order of ranks, so the result is that of a loop.
    let (me, n, len) = (world.rank(), world.size(), 100_003);
    let value = |rank: usize, i: usize| 1.0 / (1 + i * 7 + rank * 13) as f32;
    let sum = |i: usize| (1..n).fold(value(0, i), |sum, rank| sum + value(rank, i));
    let stream = Stream::new(gpu.context.clone());
    let values: Vec<f32> = (0..len).map(|i| value(me, i)).collect();
    let x = DeviceVec::new(&gpu, &stream, 0, &values);
    let group = world.device().expect("opened above");
    group.all_reduce(&stream, x.slice(), x.slice(), Op::Sum).unwrap();
    assert_eq!(x.read(&stream), (0..len).map(sum).collect::<Vec<f32>>());
    pass(&world);
}

fn device_disagreement(world: World) {
    let gpu = Gpu::open(0).expect("a GPU");
    let group = device::open(&world, &gpu, DeviceEngine::Mpi);
    let stream = Stream::new(gpu.context.clone());
    let len = if world.rank() == VICTIM { 8 } else { 7 };
    let x = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; len]);
    let error = group.all_reduce(&stream, x.slice(), x.slice(), Op::Sum).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("f32 × 7") && text.contains("f32 × 8"), "{text}");
    assert_eq!(error.culprit(), Some(VICTIM), "{text}");
    expect_cause(&world, &error, Cause::Disagreed);
}

fn device_killed(world: World) {
    let gpu = Gpu::open(0).expect("a GPU");
    let group = device::open(&world, &gpu, DeviceEngine::Mpi);
    let stream = Stream::new(gpu.context.clone());
    let x = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; 100_000]);
    let met = world.barrier();
    if world.rank() == VICTIM {
        signal_self(libc::SIGKILL);
    }
    // It may die while others are still in the barrier.
    let call = || group.all_reduce(&stream, x.slice(), x.slice(), Op::Mean);
    let error = met.and_then(|()| (0..1000).try_for_each(|_| call())).unwrap_err();
    assert_eq!(error.culprit(), Some(VICTIM), "{error}");
    expect_cause(&world, &error, Cause::Died);
}

/// Cases in which MPI's operators and ours could differ.
fn numbers(world: World) {
    let (me, n) = (world.rank(), world.size());
    let mut wrapped = [200u8; 100];
    world.all_reduce(&mut wrapped, Op::Sum).unwrap();
    assert_eq!(wrapped, [(200 * n) as u8; 100]);
    let mut wrapped = [i32::MAX; 100];
    world.all_reduce(&mut wrapped, Op::Sum).unwrap();
    assert_eq!(wrapped, [i32::MAX.wrapping_mul(n as i32); 100]);

    for op in [Op::Min, Op::Max] {
        let mut holes = [if me == n - 1 { f32::NAN } else { 1.0 }; 9];
        world.all_reduce(&mut holes, op).unwrap();
        assert!(holes.iter().all(|x| x.is_nan()), "{op:?}: {holes:?}");
    }

    // Sums that depend on their order: equal bits on all ranks and in both runs.
    let mut bits = Vec::new();
    for _ in 0..2 {
        let value = |i: usize| 1.0 / (1 + i * 7 + me * 13) as f32;
        let mut sums: Vec<f32> = (0..100_003).map(value).collect();
        world.all_reduce(&mut sums, Op::Mean).unwrap();
        bits.push(sums.iter().map(|x| x.to_bits() as i32).collect::<Vec<i32>>());
    }
    assert_eq!(bits[0], bits[1]);
    let mut first = bits[0].clone();
    world.broadcast(&mut first, 0).unwrap();
    assert_eq!(first, bits[0]);
    pass(&world);
}

/// One rank makes a different call: the errors of all ranks contain both calls.
fn disagreement(world: World) {
    let mut buffer = vec![1.0f32; if world.rank() == VICTIM { 8 } else { 7 }];
    let error = world.all_reduce(&mut buffer, Op::Sum).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("f32 × 7") && text.contains("f32 × 8"), "{text}");
    assert_eq!(error.culprit(), Some(VICTIM), "{text}");
    expect_cause(&world, &error, Cause::Disagreed);
}

fn messages_disagree(world: World) {
    let error = match world.rank() {
        0 => world.receive(&mut [0.0f32; 5], 1).unwrap_err(),
        // The send may complete before the receiver checks it; the next call fails.
        1 => world.send(&[0i32; 4], 0).and_then(|()| world.barrier()).unwrap_err(),
        _ => world.barrier().unwrap_err(),
    };
    let text = error.to_string();
    assert!(text.contains("i32 × 4") && text.contains("f32 × 5"), "{text}");
    expect_cause(&world, &error, Cause::Disagreed);
}

fn counts_disagree(world: World) {
    let n = world.size();
    let sent: Vec<usize> =
        (0..n).map(|q| if (world.rank(), q) == (VICTIM, 0) { 3 } else { 2 }).collect();
    let received = vec![2; n];
    let input = vec![1.0f32; sent.iter().sum()];
    let outcome = world.all_to_all_v(&input, &sent, &mut vec![0.0; 2 * n], &received);
    let error = outcome.and_then(|()| world.barrier()).unwrap_err();
    assert!(error.to_string().contains("sends 3 elements to rank 0, which expects 2"), "{error}");
    expect_cause(&world, &error, Cause::Disagreed);
}

/// One rank does not make the call; mpirun ends it when the others have reported.
fn late(world: World) {
    if world.rank() == VICTIM {
        std::thread::sleep(Duration::from_secs(20));
    }
    let error = world.all_reduce(&mut [1.0f32], Op::Sum).unwrap_err();
    assert_eq!(error.culprit(), Some(VICTIM), "{error}");
    expect_cause(&world, &error, Cause::Late);
}

/// One rank leaves normally while the others still need it.
fn left(world: World) {
    world.barrier().unwrap();
    if world.rank() == VICTIM {
        pass(&world);
        return;
    }
    let error = world.all_reduce(&mut [1.0f32], Op::Sum).unwrap_err();
    assert_eq!(error.culprit(), Some(VICTIM), "{error}");
    expect_cause(&world, &error, Cause::Left);
}

/// The survivors report and exit; then mpirun ends the stopped rank.
fn stopped(world: World) {
    world.barrier().unwrap();
    if world.rank() == VICTIM {
        signal_self(libc::SIGSTOP);
        std::process::exit(1);
    }
    let error = world.all_reduce(&mut [1.0f32; 1000], Op::Sum).unwrap_err();
    assert_eq!(error.culprit(), Some(VICTIM), "{error}");
    assert!(!error.to_string().contains("no progress"), "found by the heartbeat: {error}");
    expect_cause(&world, &error, Cause::Silent);
}

fn killed(world: World) {
    let met = world.barrier();
    if world.rank() == VICTIM {
        signal_self(libc::SIGKILL);
    }
    // It may die while others are still in the barrier.
    let outcome = met.and_then(|()| world.all_reduce(&mut [1.0f32; 1000], Op::Sum));
    let error = outcome.unwrap_err();
    assert_eq!(error.culprit(), Some(VICTIM), "{error}");
    expect_cause(&world, &error, Cause::Died);
}

fn signal_self(signal: i32) {
    // SAFETY: accesses no memory.
    unsafe { libc::raise(signal) };
}

/// Time of our all-reduce compared with MPI_Allreduce.
fn overhead(world: World) {
    for (bytes, times) in [(4 << 10, 2000), (64 << 10, 500), (1 << 20, 100), (16 << 20, 20)] {
        let (mut buffer, mut result) = (vec![1.0f32; bytes / 4], vec![0.0f32; bytes / 4]);
        let ours = timed(&world, times, || world.all_reduce(&mut buffer, Op::Sum).unwrap());
        let theirs = timed(&world, times, || plain_all_reduce(&buffer, &mut result));
        if world.rank() == 0 {
            println!(
                "all_reduce {bytes:>9} B: {:9.1} us, median {:9.1} us; MPI_Allreduce alone {:9.1} us, \
                 median {:9.1} us",
                ours.0, ours.1, theirs.0, theirs.1
            );
        }
    }
    pass(&world);
}

/// Best and median time in microseconds.
fn timed(world: &World, times: usize, mut call: impl FnMut()) -> (f64, f64) {
    let mut times_us: Vec<f64> = (0..times)
        .map(|_| {
            world.barrier().unwrap();
            let start = Instant::now();
            call();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times_us.sort_by(f64::total_cmp);
    (times_us[0], times_us[times / 2])
}

fn plain_all_reduce(buffer: &[f32], result: &mut [f32]) {
    let count = buffer.len() as i32;
    // SAFETY: both buffers have `count` elements and outlive the call, which blocks.
    let code = unsafe {
        let (from, to) = (buffer.as_ptr().cast(), result.as_mut_ptr().cast());
        let (kind, op, all) = (ffi::RSMPI_FLOAT, ffi::RSMPI_SUM, ffi::RSMPI_COMM_WORLD);
        ffi::MPI_Allreduce(from, to, count, kind, op, all)
    };
    assert_eq!(code, 0);
}

/// Prints the line that the script counts, one per rank.
fn pass(world: &World) {
    println!("PASS rank {}", world.rank());
}

fn expect_cause(world: &World, error: &Error, cause: Cause) {
    assert_eq!(error.cause(), Some(cause), "{error}");
    println!("PASS rank {}: {error}", world.rank());
}
