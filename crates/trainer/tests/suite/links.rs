//! A link that carries less than the others is found by measuring.

use std::time::Duration;

use lockstep_comm::{Group, Result, on_threads};
use lockstep_plan::Mesh;
use lockstep_trainer::links::{Carry, links, measure, neighbours, rounds, slow_link};

/// A world in which messages between two of the ranks take 100 ns a byte longer.
struct Slowed<'a> {
    group: &'a Group,
    pair: [usize; 2],
}

impl Carry for Slowed<'_> {
    fn send(&self, bytes: &[u8], to: usize) -> Result<()> {
        if self.pair.contains(&to) && self.pair.contains(&self.group.rank()) {
            std::thread::sleep(Duration::from_nanos(100 * bytes.len() as u64));
        }
        self.group.send(bytes, to)
    }

    fn receive(&self, bytes: &mut [u8], from: usize) -> Result<()> {
        self.group.receive(bytes, from)
    }
}

#[test]
fn the_slow_link_is_named_by_all() {
    let rounds = rounds(&neighbours(&Mesh { data: 4, ..Mesh::ONE }, &[0, 1, 2, 3]));
    for pair in [[2, 3], [0, 3]] {
        let told = on_threads(4, |world| {
            let group: &Group = world.group();
            let rates = measure(&Slowed { group, pair }, world.rank(), &rounds).unwrap();
            let links = links(group, &rounds, &rates).unwrap();
            assert_eq!(links.len(), 4);
            slow_link(&links, group.link_costs().remote).unwrap()
        });
        for slow in told {
            assert_eq!(slow.ranks, (pair[0], pair[1]));
            assert!(slow.carries <= 1e7 * 1.2, "{slow}");
        }
    }
}
