//! Every collective × algorithm × type × group size × length, on every kind of world. The ordinary run
//! leaves the large buffers to `exactness`; the whole product takes minutes and is asked for:
//! `cargo test -p lockstep-comm --test suite -- --ignored`.

use crate::check::check_all;
use crate::processes::{Spread, hosts, on_processes, shared_memory, tcp};
use lockstep_comm::on_threads;

const QUICK: [usize; 4] = [0, 1, 7, 4099];
const WHOLE: [usize; 5] = [0, 1, 7, 4099, 1 << 20];

fn on_threads_of_every_count(lengths: &[usize]) {
    for ranks in 1..=8 {
        on_threads(ranks, |world| check_all(&world, lengths));
    }
}

fn on_worlds(test: &str, spreads: impl IntoIterator<Item = Spread>, lengths: &[usize]) {
    for spread in spreads {
        let world = format!("{}x{}", spread.nodes, spread.per_node);
        on_processes(test, &world, spread, |world| check_all(&world, lengths));
    }
}

/// Several hosts, each with as many ranks.
fn several() -> [Spread; 4] {
    [hosts(2, 1), hosts(2, 2), hosts(2, 4), hosts(3, 2)]
}

#[test]
fn every_collective_on_threads() {
    on_threads_of_every_count(&QUICK);
}

#[test]
fn every_collective_over_shared_memory() {
    let test = "collectives::every_collective_over_shared_memory";
    on_worlds(test, (1..=8).map(shared_memory), &QUICK);
}

#[test]
fn every_collective_over_tcp() {
    on_worlds("collectives::every_collective_over_tcp", (1..=8).map(tcp), &QUICK);
}

#[test]
fn every_collective_on_several_hosts() {
    on_worlds("collectives::every_collective_on_several_hosts", several(), &QUICK);
}

#[test]
#[ignore = "minutes"]
fn the_whole_product_on_threads() {
    on_threads_of_every_count(&WHOLE);
}

#[test]
#[ignore = "minutes"]
fn the_whole_product_over_shared_memory() {
    let test = "collectives::the_whole_product_over_shared_memory";
    on_worlds(test, (1..=8).map(shared_memory), &WHOLE);
}

#[test]
#[ignore = "minutes"]
fn the_whole_product_over_tcp() {
    on_worlds("collectives::the_whole_product_over_tcp", (1..=8).map(tcp), &WHOLE);
}

#[test]
#[ignore = "minutes"]
fn the_whole_product_on_several_hosts() {
    on_worlds("collectives::the_whole_product_on_several_hosts", several(), &WHOLE);
}
