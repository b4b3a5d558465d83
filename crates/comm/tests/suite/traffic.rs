//! What members really send is what the formulas beside the algorithms say, message by message and
//! byte by byte; and the formulas are the closed forms that the algorithms promise.

use crate::processes::{Spread, hosts, on_processes, shared_memory, tcp};
use lockstep_comm::{
    Algo, Collective, CollectiveShape, Group, Op, Options, Traffic, candidates, on_threads,
    on_threads_with, predict_traffic, predict_traffic_with, shard_range,
};

const KINDS: [Collective; 9] = [
    Collective::AllReduce,
    Collective::Reduce,
    Collective::ReduceScatter,
    Collective::AllGather,
    Collective::Broadcast,
    Collective::Gather,
    Collective::Scatter,
    Collective::AllToAll,
    Collective::Barrier,
];

/// Calls a collective on `count` floats, in the sense of `CollectiveShape::count`. `data` is what the peers
/// reach for: the input, or the buffer that is changed.
fn call(group: &Group, kind: Collective, count: usize, root: usize, data: &mut [f32]) {
    let (me, n) = (group.rank(), group.size());
    let (mut whole, mut own) = (vec![1f32; count], vec![1f32; shard_range(count, n, me).len()]);
    let mut everybody = vec![1f32; if me == root { count * n } else { 0 }];
    match kind {
        Collective::AllReduce => group.all_reduce(data, Op::Sum),
        Collective::Reduce => group.reduce(data, Op::Sum, root),
        Collective::ReduceScatter => group.reduce_scatter(data, &mut own, Op::Sum),
        Collective::AllGather => group.all_gather(data, &mut whole),
        Collective::Broadcast => group.broadcast(data, root),
        Collective::Gather => group.gather(data, &mut everybody, root),
        Collective::Scatter => group.scatter(data, &mut whole, root),
        Collective::AllToAll => group.all_to_all(data, &mut whole),
        Collective::Barrier => group.barrier(),
        Collective::AllToAllV | Collective::SendRecv => unreachable!("not in the list"),
    }
    .unwrap();
}

/// How many floats a member brings to `call`.
fn brought(group: &Group, kind: Collective, count: usize, root: usize) -> usize {
    match kind {
        Collective::AllGather => shard_range(count, group.size(), group.rank()).len(),
        Collective::Scatter if group.rank() == root => count * group.size(),
        _ => count,
    }
}

/// Every collective with every algorithm that the group's hosts allow and `wanted` wants: what was
/// sent is what `expected` makes of the formula.
fn hold(
    group: &Group,
    lengths: &[usize],
    wanted: impl Fn(Algo) -> bool,
    expected: impl Fn(&CollectiveShape, Traffic) -> Traffic,
) {
    for (kind, &len) in KINDS.into_iter().flat_map(|kind| lengths.iter().map(move |l| (kind, l))) {
        let count = match kind {
            Collective::AllToAll => len / group.size() * group.size(),
            Collective::Barrier => 0,
            _ => len,
        };
        let root = len % group.size();
        let shape = CollectiveShape { kind, count, width: 4, root, hosts: group.hosts() };
        for algo in candidates(&shape).into_iter().filter(|a| wanted(*a)) {
            let n = brought(group, kind, count, root);
            let mut data = vec![1f32; n];
            let before = group.traffic();
            call(&group.with_algo(Some(algo)), kind, count, root, &mut data);
            let after = group.traffic();
            let really = Traffic {
                messages: after.messages - before.messages,
                bytes: after.bytes - before.bytes,
            };
            let formula =
                predict_traffic_with(&shape, algo, group.rank(), group.uses_cross_memory());
            let formula = formula.expect("there is a formula");
            let at = format!("{algo:?} {kind:?} × {count}, rank {}", group.rank());
            assert_eq!(really, expected(&shape, formula), "{at} on {:?}", group.hosts());
        }
    }
}

fn message_algorithms(algo: Algo) -> bool {
    !matches!(algo, Algo::Direct | Algo::TwoLevel)
}

#[test]
fn messages_are_sent_as_the_formulas_say() {
    for ranks in (1..=8).chain([13, 16]) {
        on_threads(ranks, |world| {
            hold(&world, &[0, 1, 7, 4099], message_algorithms, |_, formula| formula);
            if ranks <= 8 {
                hold(&world, &[300_000], message_algorithms, |_, formula| formula);
            }
        });
    }
}

#[test]
fn in_place_only_the_one_round_sends() {
    let one_round = |shape: &CollectiveShape, formula: Traffic| {
        let small = shape.kind == Collective::AllReduce && shape.count * 4 <= 16 << 10;
        if small { formula } else { Traffic::default() }
    };
    for ranks in 1..=8 {
        on_threads(ranks, |world| {
            hold(&world, &[0, 1, 7, 4096, 4099, 300_000], |a| a == Algo::Direct, one_round);
        });
    }
}

/// Messages between members count at the end that sends, whether they are waited for or started.
fn messages_count(group: &Group) {
    let (me, n) = (group.rank(), group.size());
    let before = group.traffic();
    let (next, previous) = ((me + 1) % n, (me + n - 1) % n);
    let started = group.start_send(vec![1f32; 1000], next);
    group.receive(&mut [0f32; 1000], previous).unwrap();
    started.wait().unwrap();
    let started = group.start_receive(vec![0i64; 7], previous);
    group.send(&[1i64; 7], next).unwrap();
    started.wait().unwrap();
    let after = group.traffic();
    let sent = (after.messages - before.messages, after.bytes - before.bytes);
    assert_eq!(sent, (2, 4 * 1000 + 8 * 7), "rank {me} of {n}");
}

#[test]
fn messages_between_members_are_counted() {
    for ranks in 1..=4 {
        on_threads(ranks, |world| messages_count(&world));
    }
    let test = "traffic::messages_between_members_are_counted";
    on_worlds(test, [shared_memory(3), tcp(2)], messages_count);
}

fn on_worlds(test: &str, spreads: impl IntoIterator<Item = Spread>, check: impl Fn(&Group)) {
    for spread in spreads {
        let world = format!("{}x{}", spread.nodes, spread.per_node);
        on_processes(test, &world, spread, |world| check(&world));
    }
}

const LENGTHS: [usize; 6] = [0, 1, 7, 4096, 4099, 300_000];

#[test]
fn slots_are_filled_as_the_formulas_say() {
    let options = Options { direct_access: false, ..Options::default() };
    for ranks in 2..=8 {
        on_threads_with(&options, ranks, |world| {
            hold(&world, &LENGTHS, |a| a == Algo::Direct, |_, formula| formula);
        });
    }
}

#[test]
fn processes_pull_or_pass_on_as_the_formulas_say() {
    let test = "traffic::processes_pull_or_pass_on_as_the_formulas_say";
    on_worlds(test, [2, 3, 5, 8].map(shared_memory), |group| {
        hold(group, &LENGTHS, |_| true, |_, formula| formula);
    });
}

#[test]
fn every_rank_a_host_of_its_own() {
    on_worlds("traffic::every_rank_a_host_of_its_own", [2, 5].map(tcp), |group| {
        hold(group, &LENGTHS, |_| true, |_, formula| formula);
    });
}

#[test]
fn two_levels_send_as_the_formulas_say() {
    let test = "traffic::two_levels_send_as_the_formulas_say";
    on_worlds(test, [hosts(2, 2), hosts(3, 2), hosts(2, 3)], |group| {
        hold(group, &LENGTHS, |_| true, |_, formula| formula);
        // Hosts in turn, and hosts of different sizes.
        let in_turn = group.split(Some(0), (group.rank() % 2) as i64, "in turn").unwrap().unwrap();
        assert_ne!(in_turn.hosts(), group.hosts());
        hold(&in_turn, &LENGTHS, |_| true, |_, formula| formula);
        let last = group.rank() == group.size() - 1;
        if let Some(uneven) = group.split((!last).then_some(0), 0, "uneven").unwrap() {
            hold(&uneven, &LENGTHS, |_| true, |_, formula| formula);
        }
    });
}

/// Everybody's traffic of a collective on `count` floats, each member on a host of its own.
fn everybodys(kind: Collective, algo: Algo, members: usize, count: usize) -> Vec<Traffic> {
    let hosts: Vec<usize> = (0..members).collect();
    let shape = CollectiveShape { kind, count, width: 4, root: 0, hosts: &hosts };
    (0..members).map(|me| predict_traffic(&shape, algo, me).expect("there is a formula")).collect()
}

#[test]
fn the_formulas_are_the_closed_forms() {
    for p in 1..=64u64 {
        for count in [0, 1, 7, 4099, 300_000u64] {
            let (s, part) = (4 * count, 4 * count.div_ceil(p));
            let of = |kind, algo| everybodys(kind, algo, p as usize, count as usize);
            let total = |sent: &[Traffic]| sent.iter().map(|t| t.bytes).sum::<u64>();

            // A ring moves each byte P-1 times per round trip, and no member more than the others.
            let ring = of(Collective::AllReduce, Algo::Ring);
            assert_eq!(total(&ring), 2 * (p - 1) * s);
            assert!(ring.iter().all(|t| t.messages == 2 * (p - 1)));
            assert!(ring.iter().all(|t| t.bytes <= 2 * (p - 1) * part));
            for kind in [Collective::ReduceScatter, Collective::AllGather] {
                assert_eq!(total(&of(kind, Algo::Ring)), (p - 1) * s);
                // Halving, too, sends nothing twice when everybody has a partner on all levels.
                if p.is_power_of_two() {
                    assert_eq!(total(&of(kind, Algo::Halving)), (p - 1) * s);
                }
            }
            // A chain or a tree has P-1 edges, each crossed once by everything.
            assert_eq!(total(&of(Collective::Broadcast, Algo::Ring)), (p - 1) * s);
            assert_eq!(total(&of(Collective::Broadcast, Algo::Tree)), (p - 1) * s);
            assert_eq!(total(&of(Collective::Reduce, Algo::Tree)), (p - 1) * s);
            // Two trees of half the buffer, each up and down.
            assert_eq!(total(&of(Collective::AllReduce, Algo::Tree)), 2 * (p - 1) * s);
            for kind in [Collective::Gather, Collective::Scatter] {
                assert_eq!(total(&of(kind, Algo::Flat)), (p - 1) * s);
            }
        }
    }
}

#[test]
fn halving_takes_the_fewest_steps() {
    for p in 1..=64usize {
        let steps = u64::from(p.next_power_of_two().ilog2());
        let sent = everybodys(Collective::ReduceScatter, Algo::Halving, p, 64 * p);
        assert!(sent.iter().all(|t| t.messages <= steps));
        if p.is_power_of_two() {
            assert!(sent.iter().all(|t| t.bytes == 4 * 64 * (p as u64 - 1)));
        }
        let barrier = everybodys(Collective::Barrier, Algo::Halving, p, 0);
        assert!(barrier.iter().all(|t| t.messages == steps && t.bytes == 0));
    }
}
