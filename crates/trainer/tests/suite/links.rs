//! The link with the least bandwidth is found by measuring.

use std::cell::Cell;
use std::time::{Duration, Instant};

use lockstep_comm::{Group, Result, on_threads};
use lockstep_plan::Mesh;
use lockstep_trainer::links::{PointToPoint, links, measure, neighbors, rounds, slow_link};

/// A group with a simulated clock: a byte takes 1 ns, and 100 ns between two of the ranks.
struct Simulated<'a> {
    group: &'a Group,
    slow_pair: [usize; 2],
    now: Cell<Instant>,
}

impl PointToPoint for Simulated<'_> {
    fn send(&self, bytes: &[u8], to: usize) -> Result<()> {
        let slow = [to, self.group.rank()].iter().all(|rank| self.slow_pair.contains(rank));
        let ns_per_byte = if slow { 100 } else { 1 };
        let time = Duration::from_nanos(ns_per_byte * bytes.len() as u64);
        self.now.set(self.now.get() + time);
        self.group.send(bytes, to)
    }

    fn receive(&self, bytes: &mut [u8], from: usize) -> Result<()> {
        self.group.receive(bytes, from)
    }

    fn now(&self) -> Instant {
        self.now.get()
    }
}

#[test]
fn all_ranks_find_the_slow_link() {
    let rounds = rounds(&neighbors(&Mesh { data: 4, ..Mesh::ONE }, &[0, 1, 2, 3]));
    for slow_pair in [[2, 3], [0, 3]] {
        let found = on_threads(4, |world| {
            let group: &Group = world.group();
            let messages = Simulated { group, slow_pair, now: Cell::new(Instant::now()) };
            let rates = measure(&messages, world.rank(), &rounds).unwrap();
            let links = links(group, &rounds, &rates).unwrap();
            assert_eq!(links.len(), 4);
            slow_link(&links, group.link_costs().remote).unwrap()
        });
        for slow in found {
            assert_eq!(slow.ranks, (slow_pair[0], slow_pair[1]));
            assert!((slow.bandwidth / 1e7 - 1.0).abs() < 1e-3, "{slow}");
            assert!((slow.expected / 1e9 - 1.0).abs() < 1e-3, "{slow}");
        }
    }
}
