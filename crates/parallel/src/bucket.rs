//! How much is worth sending at once.

use lockstep_comm::{Group, Kind, Shape, choose, price};

/// What does not depend on the size of a message may be this part of its price.
const OVERHEAD: f64 = 0.05;

/// The smallest bucket whose all-reduce is mostly bytes on the way, by the formulas that stand beside the
/// algorithms: smaller ones wait for each other, larger ones begin later than they could.
///
/// The same on all members, which have the same constants.
pub fn bucket_bytes(group: &Group) -> usize {
    let constants = group.constants();
    let time = |bytes: usize| {
        let shape = Shape {
            kind: Kind::AllReduce,
            count: bytes / 4,
            width: 4,
            root: 0,
            hosts: group.hosts(),
        };
        price(&shape, choose(&shape, &constants), &constants)
    };
    let sizes = (16..26).map(|power| 1usize << power);
    sizes.clone().find(|bytes| time(4) <= OVERHEAD * time(*bytes)).unwrap_or(1 << 26)
}
