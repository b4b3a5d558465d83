//! Every collective × algorithm × type × group size × length, on every kind of world.

use crate::check::check_all;
use crate::processes::{Spread, hosts, on_processes, shared_memory, tcp};
use lockstep_comm::on_threads;

#[test]
fn every_collective_on_threads() {
    for ranks in 1..=8 {
        on_threads(ranks, |world| check_all(&world, &[0, 1, 7, 4099]));
    }
}

fn on_worlds(test: &str, spreads: impl IntoIterator<Item = Spread>, lengths: &[usize]) {
    for spread in spreads {
        let world = format!("{}x{}", spread.nodes, spread.per_node);
        on_processes(test, &world, spread, |world| check_all(&world, lengths));
    }
}

#[test]
fn every_collective_over_shared_memory() {
    let test = "collectives::every_collective_over_shared_memory";
    on_worlds(test, (1..=8).map(shared_memory), &[0, 1, 7, 4099]);
}

#[test]
fn every_collective_over_tcp() {
    on_worlds("collectives::every_collective_over_tcp", (1..=8).map(tcp), &[0, 1, 7, 4099]);
}

#[test]
fn every_collective_on_several_hosts() {
    let spreads = [hosts(2, 1), hosts(2, 2), hosts(2, 4), hosts(3, 2)];
    on_worlds("collectives::every_collective_on_several_hosts", spreads, &[0, 1, 7, 4099]);
}
