//! Groups of NCCL that are split from others.

use crate::deadline::{Deadline, LIMIT};
use crate::memory::DeviceVec;
use crate::{gpu, open_nccl};
use lockstep_comm::{Group, Op, World, on_threads, shard_range};
use lockstep_cuda::{Gpu, Stream};

/// Sums world ranks in a group and gathers them in member order.
fn check_members(group: &Group, gpu: &Gpu, rank: usize) {
    let device = open_nccl(group, gpu).expect("as its parent");
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
    stream.synchronize();
    let want = members.iter().sum::<usize>() as f32;
    assert_eq!(sum.read(&stream), vec![want; len], "sum of {members:?}");
    let gathered: Vec<f32> = members.iter().flat_map(|m| vec![*m as f32; 10_001]).collect();
    assert_eq!(all.read(&stream), gathered, "order of {members:?}");
    group.barrier().unwrap();
}

/// One group after the other: while the kernels of one wait for each other, the members of another could not allocate
/// memory.
fn check_in_turns(world: &World, group: &Option<Group>, gpu: &Gpu, (turn, turns): (usize, usize)) {
    for current in 0..turns {
        if let Some(group) = group.as_ref().filter(|group| group.size() > 1 && turn == current) {
            check_members(group, gpu, world.rank());
        }
        world.barrier().unwrap();
    }
}

/// Groups of every shape, in the order of their keys, and groups of groups.
#[test]
fn subgroups_of_nccl_are_split_from_their_parent() {
    let test = "subgroups_of_nccl_are_split_from_their_parent";
    let Some(gpu) = gpu(test) else { return };
    let deadline = Deadline::start(test, LIMIT);
    for ranks in [2, 4, 8] {
        on_threads(ranks, |world| {
            let me = world.rank();
            let step = |what: &str| deadline.step(me, format!("{ranks} ranks: {what}"));
            step("opens the world");
            if open_nccl(&world, &gpu).is_none() {
                return;
            }
            step("uses the world");
            check_members(&world, &gpu, me);
            step("splits the world in halves");
            let half = world.split(Some((me % 2) as i64), 0, "half").unwrap();
            step("uses its half");
            check_in_turns(&world, &half, &gpu, (me % 2, 2));
            step("reverses the world");
            let reversed = world.split(Some(0), -(me as i64), "reversed").unwrap();
            check_in_turns(&world, &reversed, &gpu, (0, 1));
            // Rank 0 takes part in the split, but is in no group.
            step("splits without rank 0");
            let others = world.split((me > 0).then_some(7), 0, "without rank 0").unwrap();
            check_in_turns(&world, &others, &gpu, (0, 1));
            step("splits all ranks");
            let alone = world.subgroup(&[me], "alone").unwrap();
            check_in_turns(&world, &alone, &gpu, (me, ranks));
            // The parent still works, and so does a group of a group.
            step("uses the world again");
            check_members(&world, &gpu, me);
            step("splits its half");
            let quarter =
                half.expect("every rank has a half").split(Some((me / 4) as i64), 0, "quarter");
            step("uses its quarter");
            check_in_turns(&world, &quarter.unwrap(), &gpu, (2 * (me / 4) + me % 2, 4));
            step("ends");
            println!("nccl: rank {me} of {ranks} has used all groups");
        });
    }
}

/// Calls in flight when a group is split are completed first.
#[test]
fn nccl_splits_a_group_with_calls_in_flight() {
    let test = "nccl_splits_a_group_with_calls_in_flight";
    let Some(gpu) = gpu(test) else { return };
    let deadline = Deadline::start(test, LIMIT);
    on_threads(4, |world| {
        let me = world.rank();
        let Some(device) = open_nccl(&world, &gpu) else { return };
        let stream = Stream::new(gpu.context.clone());
        let x = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; 1 << 20]);
        stream.synchronize();
        world.barrier().unwrap();
        for round in 0..3 {
            deadline.step(me, format!("round {round}: reduces"));
            (0..20).for_each(|_| {
                device.all_reduce(&stream, x.slice(), x.slice(), Op::Max).unwrap();
            });
            deadline.step(me, format!("round {round}: splits"));
            let color = me / 2;
            let pair = world.split(Some(color as i64), 0, "pair").unwrap();
            stream.synchronize();
            deadline.step(me, format!("round {round}: uses its pair"));
            check_in_turns(&world, &pair, &gpu, (color, 2));
            // Ending a communicator frees memory, which waits for all kernels of the process.
            drop(pair);
            world.barrier().unwrap();
        }
        deadline.step(me, "ends");
    });
}
