//! Results to the bit: the same on every rank, in every run, and right, for numbers whose sums depend
//! on the order, for large buffers and for many ranks.

use crate::check::{check, check_all};
use crate::dice::{Float, hash, rolled};
use crate::processes::{Spread, hosts, on_processes, shared_memory, tcp};
use crate::reference::{combined, inputs};
use half::{bf16, f16};
use lockstep_comm::{
    Algo, Collective, CollectiveShape, Group, Op, candidates, on_threads, shard_range,
};
use proptest::prelude::*;

fn possible(group: &Group, kind: Collective) -> Vec<Algo> {
    candidates(&CollectiveShape { kind, count: 0, width: 4, root: 0, hosts: group.hosts() })
}

/// All-reduces what the ranks rolled with every algorithm and operation; hashes of the results.
fn fingerprints<T: Float>(group: &Group, len: usize) -> Vec<u64> {
    let (me, n) = (group.rank(), group.size());
    let brought: Vec<Vec<T>> = (0..n).map(|r| rolled(len as u64, r, len)).collect();
    let mut prints = Vec::new();
    for algo in possible(group, Collective::AllReduce) {
        for op in Op::ALL {
            let mut buffer = brought[me].clone();
            group.with_algo(Some(algo)).all_reduce(&mut buffer, op).unwrap();
            if matches!(op, Op::Sum | Op::Mean) {
                near(&buffer, &brought, op);
            }
            prints.push(hash(&buffer));
        }
    }
    prints
}

/// Every sum within what rounding may do to it: each of n-1 additions, and the end, by half a unit of
/// numbers that are at most n large.
fn near<T: Float>(sums: &[T], brought: &[Vec<T>], op: Op) {
    let n = brought.len() as f64;
    let divisor = if op == Op::Mean { n } else { 1.0 };
    for (i, sum) in sums.iter().enumerate() {
        let exact: f64 = brought.iter().map(|b| b[i].exact()).sum::<f64>() / divisor;
        let off = (sum.exact() - exact).abs();
        assert!(off <= (n + 1.0) * n * T::UNIT / divisor, "{exact} came out as {}", sum.exact());
    }
}

fn same_everywhere(group: &Group) -> Vec<u64> {
    let prints = [
        fingerprints::<f32>(group, 5001),
        fingerprints::<f64>(group, 5001),
        fingerprints::<f16>(group, 5001),
        fingerprints::<bf16>(group, 5001),
        // Long enough to come in pieces whose lengths differ from run to run.
        fingerprints::<f32>(group, 150_001),
        fingerprints::<bf16>(group, 150_001),
    ]
    .concat();
    let mut all = vec![0i64; prints.len() * group.size()];
    let own: Vec<i64> = prints.iter().map(|p| *p as i64).collect();
    group.all_gather(&own, &mut all).unwrap();
    for (rank, theirs) in all.chunks(own.len()).enumerate() {
        assert_eq!(theirs, own, "rank {rank} has other bits than rank {}", group.rank());
    }
    prints
}

#[test]
fn the_same_bits_on_every_rank_and_in_every_run() {
    for ranks in [2, 3, 4, 7] {
        let first = on_threads(ranks, |world| same_everywhere(&world));
        let again = on_threads(ranks, |world| same_everywhere(&world));
        assert_eq!(first, again);
    }
}

#[test]
fn the_same_bits_on_every_process() {
    let test = "exactness::the_same_bits_on_every_process";
    for (world, spread) in [
        ("shared", shared_memory(5)),
        ("tcp", tcp(3)),
        ("hosts", hosts(2, 2)),
        ("three", hosts(3, 2)),
    ] {
        on_processes(test, world, spread, |world| {
            assert_eq!(same_everywhere(&world), same_everywhere(&world));
        });
    }
}

const LARGE: usize = 1 << 20;

/// The large collectives of one type with every algorithm; `collectives` can do them in all types.
fn check_large(group: &Group) {
    let (me, n) = (group.rank(), group.size());
    let op = Op::ALL[n % Op::ALL.len()];
    let (input, sums): (Vec<f32>, Vec<f32>) = (inputs(me, LARGE, op), combined(n, LARGE, op));
    let (whole, own): (Vec<f32>, _) = (inputs(77, LARGE, Op::Sum), shard_range(LARGE, n, me));
    let at = |kind: Collective, algo: Algo| format!("{kind:?} {op:?} with {algo:?} on {n}");
    for algo in possible(group, Collective::AllReduce) {
        let mut buffer = input.clone();
        group.with_algo(Some(algo)).all_reduce(&mut buffer, op).unwrap();
        assert!(buffer == sums, "{}", at(Collective::AllReduce, algo));
    }
    for algo in possible(group, Collective::ReduceScatter) {
        let mut part = vec![0f32; own.len()];
        group.with_algo(Some(algo)).reduce_scatter(&input, &mut part, op).unwrap();
        assert!(part == sums[own.clone()], "{}", at(Collective::ReduceScatter, algo));
    }
    for algo in possible(group, Collective::AllGather) {
        let mut all = vec![0f32; LARGE];
        group.with_algo(Some(algo)).all_gather(&whole[own.clone()], &mut all).unwrap();
        assert!(all == whole, "{}", at(Collective::AllGather, algo));
    }
    for algo in possible(group, Collective::Broadcast) {
        let mut buffer = if me == n - 1 { whole.clone() } else { vec![0f32; LARGE] };
        group.with_algo(Some(algo)).broadcast(&mut buffer, n - 1).unwrap();
        assert!(buffer == whole, "{}", at(Collective::Broadcast, algo));
    }
    for algo in possible(group, Collective::AllToAll) {
        let each = LARGE / n;
        // Rank p sends `whole` shifted by p, so that what comes from p tells where it is from.
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

fn large_on(test: &str, spreads: impl IntoIterator<Item = Spread>) {
    for spread in spreads {
        let world = format!("{}x{}", spread.nodes, spread.per_node);
        on_processes(test, &world, spread, |world| check_large(&world));
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

    /// Random lengths one after the other in one world, with every type, algorithm and operation.
    #[test]
    fn whatever_the_lengths(
        ranks in 1..=6usize,
        lengths in proptest::collection::vec(0..3000usize, 1..4),
    ) {
        on_threads(ranks, |world| check_all(&world, &lengths));
    }

    /// Algorithms in turn on the same links leave nothing behind for each other.
    #[test]
    fn whatever_the_order(
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
