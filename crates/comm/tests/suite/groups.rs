//! Subgroups: their members and order, invalid arguments, and concurrent use of many groups.

use crate::processes::{Topology, hosts, on_processes, shared_memory, tcp};
use crate::random::Random;
use lockstep_comm::{Algo, Collective, CollectiveShape, Error, Group, Op, candidates, on_threads};

/// All-gathers the world ranks of a group's members.
fn gathered_ranks(group: &Group, world_rank: usize) -> Vec<usize> {
    let mut all = vec![0i64; group.size()];
    group.all_gather(&[world_rank as i64], &mut all).unwrap();
    all.into_iter().map(|r| r as usize).collect()
}

fn split_by_color_and_key(world: &Group) {
    let me = world.rank();
    // Rank 5 is in no group; the keys reverse the order, and colors may be negative.
    let color = (me != 5).then_some(if me.is_multiple_of(2) { -7 } else { 1 << 40 });
    let group = world.split(color, -(me as i64), "reversed").unwrap();
    let want: &[usize] = if me.is_multiple_of(2) { &[4, 2, 0] } else { &[3, 1] };
    match group {
        None => assert_eq!(me, 5),
        Some(group) => {
            assert_eq!(group.members(), want);
            assert_eq!(group.members()[group.rank()], me);
            assert_eq!(gathered_ranks(&group, me), want);
        }
    }
    // Equal keys keep the order.
    let key = i64::from(me == 0);
    let all = world.split(Some(3), key, "rank 0 last").unwrap().unwrap();
    assert_eq!(gathered_ranks(&all, me), [1, 2, 3, 4, 5, 0]);
    assert!(world.split(None, 0, "nobody").unwrap().is_none());
}

fn lists(world: &Group) {
    let me = world.rank();
    let list: &[usize] = match me {
        0 | 2 => &[2, 0],
        1 | 3 | 4 => &[4, 1, 3],
        _ => &[],
    };
    match world.subgroup(list, "listed").unwrap() {
        None => assert_eq!(me, 5),
        Some(group) => assert_eq!(gathered_ranks(&group, me), list),
    }
}

/// An invalid list of one member is an error on all members; the world stays usable.
fn invalid_lists(world: &Group) {
    let me = world.rank();
    let cases: [(&str, &[&[usize]; 6]); 5] = [
        ("of rank 1 does not contain that rank", &[&[], &[2, 3], &[], &[], &[], &[]]),
        ("rank 1 did not pass the list", &[&[0, 1], &[], &[], &[], &[], &[]]),
        ("rank 1 did not pass the list", &[&[0, 1], &[1, 0], &[], &[], &[], &[]]),
        ("rank 9 did not pass the list", &[&[], &[], &[2, 9], &[], &[], &[]]),
        ("contains rank 3 twice", &[&[], &[], &[], &[3, 3], &[], &[]]),
    ];
    for (expected, lists) in cases {
        match world.subgroup(lists[me], "wrong") {
            Err(Error::Misuse { rank, what }) => {
                assert_eq!(rank, me);
                assert!(what.contains(expected), "{what}");
            }
            other => panic!("{expected}: {:?}", other.map(|g| g.is_some())),
        }
        assert_eq!(gathered_ranks(world, me), (0..6).collect::<Vec<_>>());
    }
}

fn groups_of_groups(world: &Group) {
    let mut group = world.clone();
    while group.size() > 1 {
        let half = group.rank() * 2 / group.size();
        group = group.split(Some(half as i64), 0, "half").unwrap().unwrap();
        let mut sum = [world.rank() as i64];
        group.all_reduce(&mut sum, Op::Sum).unwrap();
        assert_eq!(sum[0], group.members().iter().sum::<usize>() as i64);
    }
    assert_eq!(group.members(), [world.rank()]);
}

#[test]
fn groups_on_threads() {
    on_threads(6, |world| {
        split_by_color_and_key(&world);
        lists(&world);
        invalid_lists(&world);
        groups_of_groups(&world);
    });
    on_threads(8, |world| groups_of_groups(&world));
}

#[test]
fn groups_on_processes() {
    for (world, topology) in [("shared", shared_memory(6)), ("tcp", tcp(6)), ("hosts", hosts(3, 2))]
    {
        on_processes("groups::groups_on_processes", world, topology, |world| {
            split_by_color_and_key(&world);
            lists(&world);
            invalid_lists(&world);
            groups_of_groups(&world);
        });
    }
}

#[test]
fn many_groups_created_and_dropped() {
    on_threads(3, |world| {
        for i in 0..60 {
            let group =
                world.split(Some(i), i * world.rank() as i64, "temporary").unwrap().unwrap();
            let mut sum = vec![1i32; 10_000];
            group.all_reduce(&mut sum, Op::Sum).unwrap();
            assert!(sum.iter().all(|x| *x == 3));
        }
    });
}

/// Random collectives of random sizes, the same on all members.
fn random_calls(group: &Group, seed: u64, calls: usize) {
    let mut random = Random(seed);
    let (me, n) = (group.rank(), group.size());
    let sum = (n * (n + 1) / 2) as i32;
    for call in 0..calls {
        // Mostly small, sometimes several pieces long.
        let len = if random.below(10) == 0 { random.below(100_000) } else { random.below(2000) };
        let kinds =
            [Collective::AllReduce, Collective::Broadcast, Collective::Gather, Collective::Barrier];
        let kind = kinds[random.below(kinds.len())];
        let root = random.below(n);
        let shape = CollectiveShape { kind, count: len, width: 4, root, hosts: group.hosts() };
        let algos = candidates(&shape);
        let group = group.with_algo(Some(algos[random.below(algos.len())]));
        let mut buffer = vec![me as i32 + 1; len];
        match kind {
            Collective::AllReduce => {
                group.all_reduce(&mut buffer, Op::Sum).unwrap();
                assert!(buffer.iter().all(|x| *x == sum), "call {call}");
            }
            Collective::Broadcast => {
                group.broadcast(&mut buffer, root).unwrap();
                assert!(buffer.iter().all(|x| *x == root as i32 + 1), "call {call}");
            }
            Collective::Gather => {
                let mut all = vec![0; if me == root { n * len } else { 0 }];
                group.gather(&buffer, &mut all, root).unwrap();
                let right = |(i, x): (usize, &i32)| *x == (i / len) as i32 + 1;
                assert!(all.iter().enumerate().all(right), "call {call}");
            }
            _ => group.barrier().unwrap(),
        }
    }
}

/// Four ranks in two rows and two columns; each rank uses its row, its column and the world from separate
/// threads.
fn a_thread_per_group(world: &Group) {
    let (row, column) = (world.rank() / 2, world.rank() % 2);
    let rows = world.split(Some(row as i64), 0, "row").unwrap().unwrap();
    let columns = world.split(Some(column as i64), 0, "column").unwrap().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| random_calls(&rows, 100 + row as u64, 200));
        scope.spawn(|| random_calls(&columns, 200 + column as u64, 200));
        random_calls(world, 300, 200);
    });
    world.barrier().unwrap();
}

#[test]
fn concurrent_groups_on_threads() {
    on_threads(4, |world| a_thread_per_group(&world));
}

#[test]
fn concurrent_groups_on_processes() {
    let topologies: [(&str, Topology); 3] =
        [("shared", shared_memory(4)), ("tcp", tcp(4)), ("hosts", hosts(2, 2))];
    for (world, topology) in topologies {
        on_processes("groups::concurrent_groups_on_processes", world, topology, |world| {
            a_thread_per_group(&world);
        });
    }
}

/// Fixing an unsupported algorithm is an error that lists the supported ones.
#[test]
fn an_unsupported_algorithm_is_rejected() {
    on_threads(2, |world| {
        let rejected = world.with_algo(Some(Algo::Flat)).all_reduce(&mut [1f32], Op::Sum);
        let what = rejected.unwrap_err().to_string();
        assert!(
            what.contains("algorithm flat does not support all_reduce") && what.contains("ring"),
            "{what}"
        );
    });
}
