//! Sent bytes equal the cost formulas: through shared memory those of the collectives, and between hosts (processes
//! connected by TCP) the closed form.

use super::cost::{CollectiveCall, collective_calls, sent};
use super::*;
use lockstep_comm::{
    Algo, BufferAccess, Collective, CollectiveShape, Group, LocalLinks, Options, choose,
    on_threads_with, predict_traffic_with, shard_range,
};
use lockstep_kernels::reference::top_k;
use lockstep_launch::{LaunchSpec, OutputMode, identity, launch};

const KINDS: [Collective; 2] = [Collective::AllReduce, Collective::ReduceScatter];

const ALL: [Compression; 5] = [
    Compression::None,
    Compression::Bf16,
    Compression::F16,
    Compression::Int8,
    Compression::TopK(0.01),
];

/// Bytes that this rank sends in one step.
fn measured(world: &World, how: Compression, kind: Collective, len: usize) -> u64 {
    let mut compressor = compressor(how, len, world);
    let mut gradient = gradient(len, world.rank(), 0);
    let mut output = vec![0f32; shard_range(len, world.size(), world.rank()).len()];
    let before = world.traffic().bytes;
    match kind {
        Collective::AllReduce => compressor.all_reduce(world, ViewMut::of(&mut gradient)),
        _ => compressor.reduce_scatter(world, View::of(&gradient), ViewMut::of(&mut output)),
    }
    .unwrap();
    world.traffic().bytes - before
}

/// Bytes of the collectives of a step, with the algorithms that the group chooses.
fn predicted(group: &Group, how: Compression, kind: Collective, len: usize) -> Option<u64> {
    let bytes = |call: CollectiveCall| {
        let CollectiveCall { kind, count, width } = call;
        let shape = CollectiveShape { kind, count, width, root: 0, hosts: group.hosts() };
        let one_host = group.hosts().iter().all(|host| *host == 0);
        let algo = if one_host { Algo::Direct } else { choose(&shape, &group.link_costs()) };
        predict_traffic_with(&shape, algo, group.rank(), access(group)).map(|traffic| traffic.bytes)
    };
    collective_calls(how, kind, len, group.size()).into_iter().map(bytes).sum()
}

/// Bytes of the top-k pairs in the shards of other ranks.
fn sent_to_others(world: &World, len: usize) -> u64 {
    let gradient: Vec<f64> = gradient(len, world.rank(), 0).iter().map(|x| *x as f64).collect();
    let own = shard_range(len, world.size(), world.rank());
    let places = top_k::indices(&gradient, (len as f64 * 0.01).ceil() as usize);
    8 * places.iter().filter(|place| !own.contains(place)).count() as u64
}

#[test]
fn shared_memory_traffic_equals_the_formula() {
    let options = Options { direct_access: false, ..Options::default() };
    for ranks in 1..=5 {
        on_threads_with(&options, ranks, |world| {
            for (len, how) in LENGTHS.into_iter().flat_map(|len| ALL.map(|how| (len, how))) {
                for kind in KINDS {
                    // An all-to-all-v depends on the data; it is tested below.
                    if let Some(predicted) = predicted(&world, how, kind, len) {
                        let sent = measured(&world, how, kind, len);
                        assert_eq!(sent, predicted, "{how} {kind:?} of {len} on {ranks}");
                    }
                }
            }
        });
    }
}

const WORLD: &str = "LOCKSTEP_TEST_WORLD";

/// Runs `rank` in processes connected by TCP, by starting this test once per rank.
fn on_hosts(test: &str, ranks: usize, rank: impl Fn(World)) {
    if let Ok(wanted) = std::env::var(WORLD) {
        if wanted != ranks.to_string() {
            return;
        }
        let identity = identity::from_process_env().expect("the launcher set it");
        let options = Options { local: LocalLinks::Tcp, ..Options::default() };
        rank(World::join(&identity, &options).expect("the world forms"));
        std::process::exit(0);
    }
    let program = std::env::current_exe().expect("this binary has a path").into_os_string();
    let command = [program].into_iter().chain([test, "--exact", "--nocapture"].map(Into::into));
    let logs =
        std::env::temp_dir().join(format!("lockstep-compress-{}-{ranks}", std::process::id()));
    let mut spec = LaunchSpec::local(ranks, command.collect(), logs.clone());
    spec.output = OutputMode::None;
    spec.extra_env = vec![(WORLD.into(), ranks.to_string()), ("RUST_BACKTRACE".into(), "0".into())];
    let outcome = launch(&spec).expect("the ranks start");
    let report = outcome.failure.map(|failure| failure.to_string()).unwrap_or_default();
    assert_eq!(outcome.exit_code, 0, "{test} on {ranks}: {report}");
    let _ = std::fs::remove_dir_all(logs);
}

#[test]
fn traffic_between_hosts_equals_the_formula() {
    for ranks in [2, 3, 4] {
        on_hosts("compress::traffic::traffic_between_hosts_equals_the_formula", ranks, |world| {
            for (len, how) in LENGTHS.into_iter().flat_map(|len| ALL.map(|how| (len, how))) {
                for kind in KINDS {
                    let bytes = measured(&world, how, kind, len);
                    let at = format!("{how} {kind:?} of {len} on {ranks}");
                    match (predicted(&world, how, kind, len), how) {
                        (Some(predicted), _) => assert_eq!(bytes, predicted, "{at}"),
                        // Counts, and the pairs for other ranks.
                        (None, _) => {
                            let counts = 8 * (ranks as u64 - 1);
                            assert_eq!(bytes, counts + sent_to_others(&world, len), "{at}");
                            assert!(bytes <= sent(how, kind, len, ranks, world.rank()), "{at}");
                        }
                    }
                    // With two hosts every algorithm sends the same.
                    if ranks == 2 && how != Compression::None && kind == Collective::AllReduce {
                        assert_eq!(bytes, sent(how, kind, len, ranks, world.rank()), "{at}");
                    }
                }
            }
        });
    }
}

#[test]
fn cost_equals_the_closed_form() {
    for p in 1..=16usize {
        for len in [0usize, 1, 7, 4099, 300_000] {
            let n = len.div_ceil(p);
            let scales = 4 * n.div_ceil(256);
            let k = (len as f64 * 0.01).ceil() as usize;
            for me in [0, p - 1] {
                let of = |how, kind| sent(how, kind, len, p, me) as usize;
                for (how, bytes) in [
                    (Compression::Bf16, 2 * n),
                    (Compression::F16, 2 * n + scales),
                    (Compression::Int8, n + scales),
                ] {
                    assert_eq!(of(how, Collective::AllReduce), 2 * (p - 1) * bytes, "{how} on {p}");
                    assert_eq!(of(how, Collective::ReduceScatter), (p - 1) * bytes, "{how} on {p}");
                }
                let largest = Compression::TopK(0.01);
                assert_eq!(of(largest, Collective::AllReduce), (p - 1) * 8 * k);
                let most = if p == 1 { 0 } else { 8 * (p - 1) + 8 * k };
                assert_eq!(of(largest, Collective::ReduceScatter), most);
            }
        }
    }
}

fn access(group: &Group) -> BufferAccess {
    match group.uses_cross_memory() {
        true => BufferAccess::CrossMemory,
        false => BufferAccess::Slots,
    }
}
