//! Which members send messages to each other, and in which order their communicators are created.

use std::collections::BTreeSet;

/// The members of a group between which messages travel on device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessagePeers {
    /// The next and the previous member, in a ring.
    Neighbors,
    /// All members.
    All,
}

/// Sender and receiver.
pub(super) type Direction = (usize, usize);

/// All directions, in steps. A member takes part in one direction of a step, and in `one_at_a_time` a step has one
/// direction.
pub(super) fn steps(
    members: usize,
    peers: MessagePeers,
    one_at_a_time: bool,
) -> Vec<Vec<Direction>> {
    let mut steps: Vec<Vec<Direction>> = Vec::new();
    for (from, to) in directions(members, peers) {
        let is_free = |step: &&mut Vec<Direction>| {
            !step.iter().any(|(a, b)| [*a, *b].contains(&from) || [*a, *b].contains(&to))
        };
        match steps.iter_mut().find(is_free).filter(|_| !one_at_a_time) {
            Some(step) => step.push((from, to)),
            None => steps.push(vec![(from, to)]),
        }
    }
    steps
}

fn directions(members: usize, peers: MessagePeers) -> BTreeSet<Direction> {
    let is_neighbor = |(a, b): Direction| (a + 1) % members == b || (b + 1) % members == a;
    let all = (0..members).flat_map(|from| (0..members).map(move |to| (from, to)));
    all.filter(|(from, to)| from != to)
        .filter(|direction| peers == MessagePeers::All || is_neighbor(*direction))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_contain_every_direction_once_and_no_member_twice() {
        for members in 1..=9 {
            for (peers, one_at_a_time) in [
                (MessagePeers::Neighbors, false),
                (MessagePeers::Neighbors, true),
                (MessagePeers::All, false),
                (MessagePeers::All, true),
            ] {
                let steps = steps(members, peers, one_at_a_time);
                let mut all: Vec<Direction> = steps.iter().flatten().copied().collect();
                all.sort_unstable();
                let want: Vec<Direction> = directions(members, peers).into_iter().collect();
                assert_eq!(all, want);
                for step in &steps {
                    assert!(!one_at_a_time || step.len() == 1, "{step:?}");
                    let ends: BTreeSet<usize> = step.iter().flat_map(|(a, b)| [*a, *b]).collect();
                    assert_eq!(ends.len(), 2 * step.len(), "{step:?}");
                }
            }
        }
    }

    #[test]
    fn the_number_of_steps_of_a_ring_does_not_grow() {
        assert_eq!(directions(2, MessagePeers::Neighbors).len(), 2);
        assert_eq!(directions(5, MessagePeers::Neighbors).len(), 10);
        assert_eq!(directions(5, MessagePeers::All).len(), 20);
        assert!(steps(64, MessagePeers::Neighbors, false).len() <= 7);
    }
}
