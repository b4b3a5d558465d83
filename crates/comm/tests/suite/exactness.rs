//! Bitwise equal results on every rank and in every run, for numbers whose sums depend on the order, for
//! large buffers and for many ranks.

use crate::check::{check, check_all};
use crate::processes::{Topology, hosts, on_processes, shared_memory, tcp};
use crate::random::{Float, hash, random_inputs};
use crate::reference::{combined, inputs};
use half::{bf16, f16};
use lockstep_comm::{
    Algo, Collective, CollectiveShape, Group, Op, candidates, on_threads, shard_range,
};
use proptest::prelude::*;

fn supported(group: &Group, kind: Collective) -> Vec<Algo> {
    candidates(&CollectiveShape { kind, count: 0, width: 4, root: 0, hosts: group.hosts() })
}

/// All-reduces random inputs with every algorithm and operator; returns hashes of the results.
fn result_hashes<T: Float>(group: &Group, len: usize) -> Vec<u64> {
    let (me, n) = (group.rank(), group.size());
    let inputs_of: Vec<Vec<T>> = (0..n).map(|r| random_inputs(len as u64, r, len)).collect();
    let mut hashes = Vec::new();
    for algo in supported(group, Collective::AllReduce) {
        for op in Op::ALL {
            let mut buffer = inputs_of[me].clone();
            group.with_algo(Some(algo)).all_reduce(&mut buffer, op).unwrap();
            if matches!(op, Op::Sum | Op::Mean) {
                assert_near(&buffer, &inputs_of, op);
            }
            hashes.push(hash(&buffer));
        }
    }
    hashes
}

/// Every sum is within its rounding error: n-1 additions and the final rounding, each by at most half a unit
/// of numbers up to n.
fn assert_near<T: Float>(sums: &[T], inputs_of: &[Vec<T>], op: Op) {
    let n = inputs_of.len() as f64;
    let divisor = if op == Op::Mean { n } else { 1.0 };
    for (i, sum) in sums.iter().enumerate() {
        let exact: f64 = inputs_of.iter().map(|b| b[i].exact()).sum::<f64>() / divisor;
        let off = (sum.exact() - exact).abs();
        assert!(off <= (n + 1.0) * n * T::UNIT / divisor, "expected {exact}, got {}", sum.exact());
    }
}

fn equal_on_all_ranks(group: &Group) -> Vec<u64> {
    let hashes = [
        result_hashes::<f32>(group, 5001),
        result_hashes::<f64>(group, 5001),
        result_hashes::<f16>(group, 5001),
        result_hashes::<bf16>(group, 5001),
        // Long enough to be received in pieces whose lengths differ from run to run.
        result_hashes::<f32>(group, 150_001),
        result_hashes::<bf16>(group, 150_001),
    ]
    .concat();
    let mut all = vec![0i64; hashes.len() * group.size()];
    let own: Vec<i64> = hashes.iter().map(|h| *h as i64).collect();
    group.all_gather(&own, &mut all).unwrap();
    for (rank, theirs) in all.chunks(own.len()).enumerate() {
        assert_eq!(theirs, own, "rank {rank} has different bits than rank {}", group.rank());
    }
    hashes
}

#[test]
fn equal_bits_on_all_ranks_and_in_all_runs() {
    for ranks in [2, 3, 4, 7] {
        let first = on_threads(ranks, |world| equal_on_all_ranks(&world));
        let second = on_threads(ranks, |world| equal_on_all_ranks(&world));
        assert_eq!(first, second);
    }
}

#[test]
fn equal_bits_on_all_processes() {
    let test = "exactness::equal_bits_on_all_processes";
    for (world, topology) in [
        ("shared", shared_memory(5)),
        ("tcp", tcp(3)),
        ("hosts", hosts(2, 2)),
        ("three", hosts(3, 2)),
    ] {
        on_processes(test, world, topology, |world| {
            assert_eq!(equal_on_all_ranks(&world), equal_on_all_ranks(&world));
        });
    }
}

const LARGE: usize = 1 << 20;

/// Large collectives of one type with every algorithm; `collectives` covers all types.
fn check_large(group: &Group) {
    let (me, n) = (group.rank(), group.size());
    let op = Op::ALL[n % Op::ALL.len()];
    let (input, sums): (Vec<f32>, Vec<f32>) = (inputs(me, LARGE, op), combined(n, LARGE, op));
    let (whole, own): (Vec<f32>, _) = (inputs(77, LARGE, Op::Sum), shard_range(LARGE, n, me));
    let at = |kind: Collective, algo: Algo| format!("{kind:?} {op:?} with {algo:?} on {n}");
    for algo in supported(group, Collective::AllReduce) {
        let mut buffer = input.clone();
        group.with_algo(Some(algo)).all_reduce(&mut buffer, op).unwrap();
        assert!(buffer == sums, "{}", at(Collective::AllReduce, algo));
    }
    for algo in supported(group, Collective::ReduceScatter) {
        let mut part = vec![0f32; own.len()];
        group.with_algo(Some(algo)).reduce_scatter(&input, &mut part, op).unwrap();
        assert!(part == sums[own.clone()], "{}", at(Collective::ReduceScatter, algo));
    }
    for algo in supported(group, Collective::AllGather) {
        let mut all = vec![0f32; LARGE];
        group.with_algo(Some(algo)).all_gather(&whole[own.clone()], &mut all).unwrap();
        assert!(all == whole, "{}", at(Collective::AllGather, algo));
    }
    for algo in supported(group, Collective::Broadcast) {
        let mut buffer = if me == n - 1 { whole.clone() } else { vec![0f32; LARGE] };
        group.with_algo(Some(algo)).broadcast(&mut buffer, n - 1).unwrap();
        assert!(buffer == whole, "{}", at(Collective::Broadcast, algo));
    }
    for algo in supported(group, Collective::AllToAll) {
        let each = LARGE / n;
        // Rank p sends `whole` shifted by p, so that the received data identifies its sender.
        let sent: Vec<f32> = (0..each * n).map(|i| whole[(i + me) % LARGE]).collect();
        let mut got = vec![0f32; each * n];
        group.with_algo(Some(algo)).all_to_all(&sent, &mut got).unwrap();
        let right =
            |p: usize| (0..each).all(|i| got[p * each + i] == whole[(me * each + i + p) % LARGE]);
        assert!((0..n).all(right), "{}", at(Collective::AllToAll, algo));
    }
}

#[test]
fn large_buffers_on_threads() {
    for ranks in 2..=8 {
        on_threads(ranks, |world| check_large(&world));
    }
}

fn large_on(test: &str, topologies: impl IntoIterator<Item = Topology>) {
    for topology in topologies {
        let world = format!("{}x{}", topology.nodes, topology.per_node);
        on_processes(test, &world, topology, |world| check_large(&world));
    }
}

#[test]
fn large_buffers_over_shared_memory() {
    large_on("exactness::large_buffers_over_shared_memory", (2..=8).map(shared_memory));
}

#[test]
fn large_buffers_over_tcp() {
    large_on("exactness::large_buffers_over_tcp", (2..=8).map(tcp));
}

#[test]
fn large_buffers_on_several_hosts() {
    large_on("exactness::large_buffers_on_several_hosts", [hosts(2, 2), hosts(3, 2)]);
}

#[test]
fn many_ranks() {
    for ranks in [16, 33, 64] {
        on_threads(ranks, |world| {
            for algo in Algo::ALL.into_iter().filter(|a| *a != Algo::Engine) {
                check::<f32>(&world, 131, algo);
            }
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..Default::default() })]

    /// Random lengths one after the other in one world, with every type, algorithm and operator.
    #[test]
    fn all_lengths(
        ranks in 1..=6usize,
        lengths in proptest::collection::vec(0..3000usize, 1..4),
    ) {
        on_threads(ranks, |world| check_all(&world, &lengths));
    }

    /// Different algorithms one after the other on the same links.
    #[test]
    fn all_orders_of_algorithms(
        ranks in 2..=5usize,
        calls in proptest::collection::vec((0..6usize, 0..70_000usize), 1..6),
    ) {
        on_threads(ranks, |world| {
            for &(algo, len) in &calls {
                check::<i32>(&world, len, Algo::ALL[algo]);
            }
        });
    }
}
