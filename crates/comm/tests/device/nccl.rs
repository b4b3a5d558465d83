//! NCCL itself: groups that are split from others, registered memory, and what the library can do.

use crate::memory::{DeviceVec, read, write};
use crate::{gpu, open_nccl};
use lockstep_comm::{DeviceGroup, Dtype, Group, Op, World, nccl_report, on_threads, shard_range};
use lockstep_cuda::{Gpu, Stream};

#[test]
fn the_library_reports_its_features() {
    let Some(_) = gpu("the_library_reports_its_features") else { return };
    match nccl_report() {
        Ok(report) => {
            println!("NCCL {}: {:?}, {}", report.version, report.features, report.path.display());
            assert!(report.features.contains(&"split"), "{report:?}");
        }
        Err(error) => println!("skipped: {error}"),
    }
}

/// Sums world ranks in a group and gathers them in member order.
fn check_members(group: &Group, device: &DeviceGroup, gpu: &Gpu, rank: usize) {
    let (members, len) = (group.members(), 10_001 * group.size());
    let stream = Stream::new(gpu.context.clone());
    let sum = DeviceVec::new(gpu, &stream, 0, &vec![rank as f32; len]);
    let own = vec![rank as f32; shard_range(len, group.size(), group.rank()).len()];
    let own = DeviceVec::new(gpu, &stream, 0, &own);
    let all = DeviceVec::new(gpu, &stream, 0, &vec![-1.0f32; len]);
    // Allocations wait for all kernels of a process, and kernels of NCCL for the other ranks.
    stream.synchronize();
    group.barrier().unwrap();
    device.all_reduce(&stream, sum.slice(), sum.slice(), Op::Sum).unwrap();
    device.all_gather(&stream, own.slice(), all.slice()).unwrap();
    let want = members.iter().sum::<usize>() as f32;
    assert_eq!(sum.read(&stream), vec![want; len], "sum of {members:?}");
    let gathered: Vec<f32> = members.iter().flat_map(|m| vec![*m as f32; 10_001]).collect();
    assert_eq!(all.read(&stream), gathered, "order of {members:?}");
    group.barrier().unwrap();
}

/// Groups of every shape, in the order of their keys, and groups of groups.
#[test]
fn subgroups_of_nccl_are_split_from_their_parent() {
    let Some(gpu) = gpu("subgroups_of_nccl_are_split_from_their_parent") else { return };
    for ranks in [2, 4, 8] {
        on_threads(ranks, |world| {
            let Some(device) = open_nccl(&world, &gpu) else { return };
            let me = world.rank();
            check_members(&world, &device, &gpu, me);
            let check = |group: Option<Group>| {
                if let Some(group) = group.filter(|group| group.size() > 1) {
                    let device = open_nccl(&group, &gpu).expect("as its parent");
                    check_members(&group, &device, &gpu, me);
                }
                // One group at a time, so that the kernels of all ranks fit on the GPU.
                world.barrier().unwrap();
            };
            let half = world.split(Some((me % 2) as i64), 0, "half").unwrap();
            check(half.clone());
            check(world.split(Some(0), -(me as i64), "reversed").unwrap());
            // Rank 0 takes part in the split, but is in no group.
            check(world.split((me > 0).then_some(7), 0, "without rank 0").unwrap());
            check(world.subgroup(&[me], "alone").unwrap());
            // The parent still works, and so does a group of a group.
            check_members(&world, &device, &gpu, me);
            let half = half.expect("every rank has a half");
            check(half.split(Some((me / 4) as i64), 0, "quarter").unwrap());
            println!("nccl: rank {me} of {ranks} has used all groups");
        });
    }
}

/// Calls in flight when a group is split are completed first.
#[test]
fn nccl_splits_a_group_with_calls_in_flight() {
    let Some(gpu) = gpu("nccl_splits_a_group_with_calls_in_flight") else { return };
    on_threads(4, |world| {
        let Some(device) = open_nccl(&world, &gpu) else { return };
        let stream = Stream::new(gpu.context.clone());
        let x = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; 1 << 20]);
        stream.synchronize();
        world.barrier().unwrap();
        for round in 0..5 {
            (0..20).for_each(|_| {
                device.all_reduce(&stream, x.slice(), x.slice(), Op::Max).unwrap();
            });
            let color = world.rank() / 2;
            let pair = world.split(Some(color as i64), 0, "pair").unwrap().expect("has a color");
            stream.synchronize();
            let device = open_nccl(&pair, &gpu).expect("as its parent");
            check_members(&pair, &device, &gpu, world.rank());
            println!("round {round}");
            world.barrier().unwrap();
        }
    });
}

/// Collectives on memory that NCCL has allocated and registered, in place, at its start and behind it.
#[test]
fn nccl_uses_registered_memory() {
    let Some(gpu) = gpu("nccl_uses_registered_memory") else { return };
    for ranks in [1, 2, 4] {
        on_threads(ranks, |world| {
            let Some(device) = open_nccl(&world, &gpu) else { return };
            let stream = Stream::new(gpu.context.clone());
            // Memory is freed and allocated again.
            for round in 0..3 {
                check_registered(&world, &device, &stream, round);
            }
        });
    }
}

fn check_registered(world: &World, device: &DeviceGroup, stream: &Stream, round: usize) {
    let (me, ranks) = (world.rank(), world.size());
    let len = 1_000_000 * ranks;
    let Some(memory) = device.allocate_registered(4 * (len + 4096)).unwrap() else {
        return println!("skipped: NCCL is older than 2.19");
    };
    println!("rank {me} of {ranks}: registered as {}", memory.registration());
    let sum = (0..ranks).map(|rank| (rank + round) as f32).sum::<f32>();
    for start in [0, 1024] {
        let own = shard_range(len, ranks, me);
        // SAFETY: the memory lives until the stream has completed the calls.
        let slice =
            |from: usize, to: usize| unsafe { memory.slice(start + from..start + to, Dtype::F32) };
        let (whole, shard) = (slice(0, len), slice(own.start, own.end));
        let prepare = || {
            write(stream, whole, &vec![(me + round) as f32; len]);
            stream.synchronize();
            world.barrier().unwrap();
        };
        prepare();
        device.all_reduce(stream, whole, whole, Op::Sum).unwrap();
        assert_eq!(read::<f32>(stream, whole), vec![sum; len]);
        prepare();
        device.reduce_scatter(stream, whole, shard, Op::Sum).unwrap();
        assert_eq!(read::<f32>(stream, shard), vec![sum; own.len()]);
        device.all_gather(stream, shard, whole).unwrap();
        assert_eq!(read::<f32>(stream, whole), vec![sum; len]);
    }
    // Freeing waits for the kernels of all ranks.
    world.barrier().unwrap();
}
