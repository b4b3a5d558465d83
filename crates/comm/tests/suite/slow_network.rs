//! Worlds on a slow and lossy network: all connections go through a proxy that delays and drops.

use crate::processes::{Topology, WORLD, hosts, on_processes, tcp};
use crate::proxy::{Conditions, Proxy};
use lockstep_comm::{Op, World};
use std::time::Duration;

/// A proxy for the ranks of a test; `None` inside a rank.
pub fn proxy(conditions: Conditions) -> Option<Proxy> {
    let inside = std::env::var(WORLD).is_ok();
    (!inside).then(|| Proxy::start(([127, 0, 0, 1], 0).into(), conditions).expect("a free port"))
}

pub fn through(proxy: Option<&Proxy>, topology: Topology) -> Topology {
    Topology { via: proxy.map(Proxy::addr), ..topology }
}

/// Collectives on the world and on a new group, which opens its own links.
fn work(world: &World) {
    let sum = (0..world.size()).sum::<usize>() as f32;
    let group = world.split(Some(0), 0, "all").expect("a group").expect("all ranks have a color");
    for group in [world.group(), &group] {
        let mut numbers = vec![world.rank() as f32; 5000];
        group.all_reduce(&mut numbers, Op::Sum).expect("the network works");
        assert_eq!(numbers, vec![sum; 5000]);
    }
}

fn works(test: &str, conditions: Conditions, topology: Topology) {
    let proxy = proxy(conditions);
    let topology = through(proxy.as_ref(), topology);
    on_processes(test, "world", topology, |world| work(&world));
    let sent = proxy.map_or(0, |proxy| proxy.bytes());
    assert!(sent > 20_000, "only {sent} bytes were sent through the proxy");
}

/// A link needs three round trips, and an attempt was given up after 500 ms.
#[test]
fn links_form_with_a_round_trip_of_200_ms() {
    let test = "slow_network::links_form_with_a_round_trip_of_200_ms";
    let delay = Duration::from_millis(100);
    works(test, Conditions { delay, ..Conditions::default() }, tcp(2));
}

#[test]
fn a_world_starts_while_packets_are_lost() {
    let test = "slow_network::a_world_starts_while_packets_are_lost";
    works(test, Conditions { loss: 0.05, ..Conditions::default() }, tcp(3));
}

#[test]
#[ignore = "takes a minute"]
fn a_world_works_with_a_round_trip_of_500_ms_and_5_percent_loss() {
    let test = "slow_network::a_world_works_with_a_round_trip_of_500_ms_and_5_percent_loss";
    let delay = Duration::from_millis(250);
    works(test, Conditions { delay, loss: 0.05, ..Conditions::default() }, hosts(2, 2));
}

/// Between two hosts with two ranks each, a ring sends 3P bytes of an all-reduce of P bytes, two levels send 2P.
#[test]
fn a_slow_link_between_hosts_carries_2p_instead_of_3p_bytes() {
    let test = "slow_network::a_slow_link_between_hosts_carries_2p_instead_of_3p_bytes";
    const COUNT: usize = 2 << 20;
    let proxy = proxy(Conditions { rate: Some(20e6), ..Conditions::default() });
    // The world measures the link when it starts.
    on_processes(test, "world", through(proxy.as_ref(), hosts(2, 2)), |world| {
        let mut numbers = vec![world.rank() as f32; COUNT];
        world.all_reduce(&mut numbers, Op::Sum).expect("the network works");
        assert!(numbers.iter().all(|x| *x == 6.0));
        let record = world.flight_record();
        let last = record.last().expect("a collective");
        let (costs, chosen) = (world.link_costs(), (last.kind, last.algo));
        assert_eq!(chosen, ("all_reduce", "two_level"), "{costs:?}");
    });
    let Some(proxy) = proxy else { return };
    let (sent, bytes) = (proxy.bytes() as f64, (4 * COUNT) as f64);
    // Starting the world and measuring the link sends about 2 MB more.
    assert!((2.0..2.5).contains(&(sent / bytes)), "{} P were sent", sent / bytes);
}
