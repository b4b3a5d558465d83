//! Every collective × algorithm × type × group size × length, on every kind of world. By default without
//! large buffers, which `exactness` covers; all combinations take minutes:
//! `cargo test -p lockstep-comm --test suite -- --ignored`.

use crate::check::check_all;
use crate::processes::{Topology, hosts, on_processes, shared_memory, tcp};
use lockstep_comm::on_threads;

const SHORT: [usize; 4] = [0, 1, 7, 4099];
const ALL_LENGTHS: [usize; 5] = [0, 1, 7, 4099, 1 << 20];

fn on_all_thread_counts(lengths: &[usize]) {
    for ranks in 1..=8 {
        on_threads(ranks, |world| check_all(&world, lengths));
    }
}

fn on_worlds(test: &str, topologies: impl IntoIterator<Item = Topology>, lengths: &[usize]) {
    for topology in topologies {
        let world = format!("{}x{}", topology.nodes, topology.per_node);
        on_processes(test, &world, topology, |world| check_all(&world, lengths));
    }
}

/// Several hosts with equally many ranks.
fn several_hosts() -> [Topology; 4] {
    [hosts(2, 1), hosts(2, 2), hosts(2, 4), hosts(3, 2)]
}

#[test]
fn all_collectives_on_threads() {
    on_all_thread_counts(&SHORT);
}

#[test]
fn all_collectives_over_shared_memory() {
    let test = "collectives::all_collectives_over_shared_memory";
    on_worlds(test, (1..=8).map(shared_memory), &SHORT);
}

#[test]
fn all_collectives_over_tcp() {
    on_worlds("collectives::all_collectives_over_tcp", (1..=8).map(tcp), &SHORT);
}

#[test]
fn all_collectives_on_several_hosts() {
    on_worlds("collectives::all_collectives_on_several_hosts", several_hosts(), &SHORT);
}

#[test]
#[ignore = "takes minutes"]
fn all_combinations_on_threads() {
    on_all_thread_counts(&ALL_LENGTHS);
}

#[test]
#[ignore = "takes minutes"]
fn all_combinations_over_shared_memory() {
    let test = "collectives::all_combinations_over_shared_memory";
    on_worlds(test, (1..=8).map(shared_memory), &ALL_LENGTHS);
}

#[test]
#[ignore = "takes minutes"]
fn all_combinations_over_tcp() {
    on_worlds("collectives::all_combinations_over_tcp", (1..=8).map(tcp), &ALL_LENGTHS);
}

#[test]
#[ignore = "takes minutes"]
fn all_combinations_on_several_hosts() {
    on_worlds("collectives::all_combinations_on_several_hosts", several_hosts(), &ALL_LENGTHS);
}
