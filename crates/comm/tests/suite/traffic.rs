//! Counted traffic equals the cost formulas of the algorithms, in messages and bytes, and the formulas equal
//! the closed forms in their documentation.

use crate::processes::{Topology, hosts, on_processes, shared_memory, tcp};
use lockstep_comm::{
    Algo, BufferAccess, Collective, CollectiveShape, Group, Op, Options, Traffic, candidates,
    on_threads, on_threads_with, predict_traffic, predict_traffic_with, shard_range,
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

/// Calls a collective on `count` floats, as in `CollectiveShape::count`. `data` is the buffer that peers
/// access: the input, or the buffer that is changed.
fn call(group: &Group, kind: Collective, count: usize, root: usize, data: &mut [f32]) {
    let (me, n) = (group.rank(), group.size());
    let (mut whole, mut own) = (vec![1f32; count], vec![1f32; shard_range(count, n, me).len()]);
    let mut gathered = vec![1f32; if me == root { count * n } else { 0 }];
    match kind {
        Collective::AllReduce => group.all_reduce(data, Op::Sum),
        Collective::Reduce => group.reduce(data, Op::Sum, root),
        Collective::ReduceScatter => group.reduce_scatter(data, &mut own, Op::Sum),
        Collective::AllGather => group.all_gather(data, &mut whole),
        Collective::Broadcast => group.broadcast(data, root),
        Collective::Gather => group.gather(data, &mut gathered, root),
        Collective::Scatter => group.scatter(data, &mut whole, root),
        Collective::AllToAll => group.all_to_all(data, &mut whole),
        Collective::Barrier => group.barrier(),
        Collective::AllToAllV | Collective::SendRecv => unreachable!("not in the list"),
    }
    .unwrap();
}

/// Number of floats that a member passes to `call`.
fn input_len(group: &Group, kind: Collective, count: usize, root: usize) -> usize {
    match kind {
        Collective::AllGather => shard_range(count, group.size(), group.rank()).len(),
        Collective::Scatter if group.rank() == root => count * group.size(),
        _ => count,
    }
}

/// Asserts that the traffic of every collective with every supported and `wanted` algorithm is what
/// `expected` derives from the formula.
fn assert_traffic(
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
            let n = input_len(group, kind, count, root);
            let mut data = vec![1f32; n];
            let before = group.traffic();
            call(&group.with_algo(Some(algo)), kind, count, root, &mut data);
            let after = group.traffic();
            let counted = Traffic {
                messages: after.messages - before.messages,
                bytes: after.bytes - before.bytes,
            };
            let formula = predict_traffic_with(&shape, algo, group.rank(), access(group));
            let formula = formula.expect("there is a formula");
            let at = format!("{algo:?} {kind:?} × {count}, rank {}", group.rank());
            assert_eq!(counted, expected(&shape, formula), "{at} on {:?}", group.hosts());
        }
    }
}

fn message_algorithms(algo: Algo) -> bool {
    !matches!(algo, Algo::Direct | Algo::TwoLevel)
}

#[test]
fn messages_match_the_formulas() {
    for ranks in (1..=8).chain([13, 16]) {
        on_threads(ranks, |world| {
            assert_traffic(&world, &[0, 1, 7, 4099], message_algorithms, |_, formula| formula);
            if ranks <= 8 {
                assert_traffic(&world, &[300_000], message_algorithms, |_, formula| formula);
            }
        });
    }
}

#[test]
fn in_place_only_single_round_calls_send() {
    let one_round = |shape: &CollectiveShape, formula: Traffic| {
        let small = shape.kind == Collective::AllReduce && shape.count * 4 <= 16 << 10;
        let sent = if small { formula } else { Traffic::default() };
        let in_place = predict_traffic_with(shape, Algo::Direct, 0, BufferAccess::InPlace);
        assert_eq!(in_place, Some(sent), "{shape:?}");
        sent
    };
    for ranks in 1..=8 {
        on_threads(ranks, |world| {
            assert_traffic(
                &world,
                &[0, 1, 7, 4096, 4099, 300_000],
                |a| a == Algo::Direct,
                one_round,
            );
        });
    }
}

/// Two hosts of two ranks: in place, only the slices that cross the network are sent.
#[test]
fn two_levels_in_place_send_only_between_hosts() {
    let bytes = 4 << 20;
    let cases =
        [(Collective::AllReduce, 2), (Collective::AllGather, 1), (Collective::ReduceScatter, 1)];
    for (kind, halves) in cases {
        let shape =
            CollectiveShape { kind, count: bytes / 4, width: 4, root: 0, hosts: &[0, 0, 1, 1] };
        for me in 0..4 {
            let sent = predict_traffic_with(&shape, Algo::TwoLevel, me, BufferAccess::InPlace);
            assert_eq!(sent.unwrap().bytes as usize, halves * bytes / 4, "{kind:?}, rank {me}");
        }
    }
}

/// Point-to-point messages are counted by the sender, blocking or started.
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
fn point_to_point_messages_are_counted() {
    for ranks in 1..=4 {
        on_threads(ranks, |world| messages_count(&world));
    }
    let test = "traffic::point_to_point_messages_are_counted";
    on_worlds(test, [shared_memory(3), tcp(2)], messages_count);
}

fn on_worlds(test: &str, topologies: impl IntoIterator<Item = Topology>, check: impl Fn(&Group)) {
    for topology in topologies {
        let world = format!("{}x{}", topology.nodes, topology.per_node);
        on_processes(test, &world, topology, |world| check(&world));
    }
}

const LENGTHS: [usize; 6] = [0, 1, 7, 4096, 4099, 300_000];

#[test]
fn slots_match_the_formulas() {
    let options = Options { direct_access: false, ..Options::default() };
    for ranks in 2..=8 {
        on_threads_with(&options, ranks, |world| {
            assert_traffic(&world, &LENGTHS, |a| a == Algo::Direct, |_, formula| formula);
        });
    }
}

#[test]
fn processes_match_the_formulas() {
    let test = "traffic::processes_match_the_formulas";
    on_worlds(test, [2, 3, 5, 8].map(shared_memory), |group| {
        assert_traffic(group, &LENGTHS, |_| true, |_, formula| formula);
    });
}

#[test]
fn one_rank_per_host_matches_the_formulas() {
    on_worlds("traffic::one_rank_per_host_matches_the_formulas", [2, 5].map(tcp), |group| {
        assert_traffic(group, &LENGTHS, |_| true, |_, formula| formula);
    });
}

#[test]
fn two_levels_match_the_formulas() {
    let test = "traffic::two_levels_match_the_formulas";
    on_worlds(test, [hosts(2, 2), hosts(3, 2), hosts(2, 3)], |group| {
        assert_traffic(group, &LENGTHS, |_| true, |_, formula| formula);
        // Interleaved hosts, and hosts of different sizes.
        let interleaved =
            group.split(Some(0), (group.rank() % 2) as i64, "interleaved").unwrap().unwrap();
        assert_ne!(interleaved.hosts(), group.hosts());
        assert_traffic(&interleaved, &LENGTHS, |_| true, |_, formula| formula);
        let last = group.rank() == group.size() - 1;
        if let Some(uneven) = group.split((!last).then_some(0), 0, "uneven").unwrap() {
            assert_traffic(&uneven, &LENGTHS, |_| true, |_, formula| formula);
        }
    });
}

/// Traffic of all members of a collective on `count` floats, with one member per host.
fn traffic_of_all(kind: Collective, algo: Algo, members: usize, count: usize) -> Vec<Traffic> {
    let hosts: Vec<usize> = (0..members).collect();
    let shape = CollectiveShape { kind, count, width: 4, root: 0, hosts: &hosts };
    (0..members).map(|me| predict_traffic(&shape, algo, me).expect("there is a formula")).collect()
}

#[test]
fn formulas_equal_the_closed_forms() {
    for p in 1..=64u64 {
        for count in [0, 1, 7, 4099, 300_000u64] {
            let (s, part) = (4 * count, 4 * count.div_ceil(p));
            let of = |kind, algo| traffic_of_all(kind, algo, p as usize, count as usize);
            let total = |sent: &[Traffic]| sent.iter().map(|t| t.bytes).sum::<u64>();

            // A ring sends each byte P-1 times per phase, and all members send equally much.
            let ring = of(Collective::AllReduce, Algo::Ring);
            assert_eq!(total(&ring), 2 * (p - 1) * s);
            assert!(ring.iter().all(|t| t.messages == 2 * (p - 1)));
            assert!(ring.iter().all(|t| t.bytes <= 2 * (p - 1) * part));
            for kind in [Collective::ReduceScatter, Collective::AllGather] {
                assert_eq!(total(&of(kind, Algo::Ring)), (p - 1) * s);
                // Halving sends the minimum as well if all members have a partner on all levels.
                if p.is_power_of_two() {
                    assert_eq!(total(&of(kind, Algo::Halving)), (p - 1) * s);
                }
            }
            // A chain or a tree has P-1 edges, and each carries the whole buffer once.
            assert_eq!(total(&of(Collective::Broadcast, Algo::Ring)), (p - 1) * s);
            assert_eq!(total(&of(Collective::Broadcast, Algo::Tree)), (p - 1) * s);
            assert_eq!(total(&of(Collective::Reduce, Algo::Tree)), (p - 1) * s);
            // Two trees of half the buffer, each in both directions.
            assert_eq!(total(&of(Collective::AllReduce, Algo::Tree)), 2 * (p - 1) * s);
            for kind in [Collective::Gather, Collective::Scatter] {
                assert_eq!(total(&of(kind, Algo::Flat)), (p - 1) * s);
            }
        }
    }
}

#[test]
fn halving_needs_the_minimum_of_steps() {
    for p in 1..=64usize {
        let steps = u64::from(p.next_power_of_two().ilog2());
        let sent = traffic_of_all(Collective::ReduceScatter, Algo::Halving, p, 64 * p);
        assert!(sent.iter().all(|t| t.messages <= steps));
        if p.is_power_of_two() {
            assert!(sent.iter().all(|t| t.bytes == 4 * 64 * (p as u64 - 1)));
        }
        let barrier = traffic_of_all(Collective::Barrier, Algo::Halving, p, 0);
        assert!(barrier.iter().all(|t| t.messages == steps && t.bytes == 0));
    }
}

fn access(group: &Group) -> BufferAccess {
    match group.uses_cross_memory() {
        true => BufferAccess::CrossMemory,
        false => BufferAccess::Slots,
    }
}
