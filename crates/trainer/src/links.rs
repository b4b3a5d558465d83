//! Bandwidth of the links between hosts, measured between steps when ranks wait although none of them is slow. Sends a
//! few MiB per link. Does not measure links within a host: these are memory copies, and a slow one shows up as a slow
//! rank.

use std::fmt;
use std::time::Instant;

use lockstep_comm::{Group, LinkCost, Result};
use lockstep_plan::{GroupKind, Mesh};

/// Point-to-point messages between two ranks, and the clock that times them.
pub trait PointToPoint {
    fn send(&self, bytes: &[u8], to: usize) -> Result<()>;
    fn receive(&self, bytes: &mut [u8], from: usize) -> Result<()>;
    fn now(&self) -> Instant {
        Instant::now()
    }
}

impl PointToPoint for Group {
    fn send(&self, bytes: &[u8], to: usize) -> Result<()> {
        Group::send(self, bytes, to)
    }

    fn receive(&self, bytes: &mut [u8], from: usize) -> Result<()> {
        Group::receive(self, bytes, from)
    }
}

/// Bytes of a timed message.
const MESSAGE: usize = 1 << 20;
const TRIES: usize = 4;

/// A link is slow if its bandwidth is less than this fraction of the median of the others.
const SLOW_FRACTION: f64 = 1.0 / 3.0;

/// Bandwidth between two ranks, in bytes per second.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Link {
    pub ranks: (usize, usize),
    /// From the first rank to the second.
    pub forward: f64,
    /// From the second rank to the first.
    pub reverse: f64,
}

/// A link with much less bandwidth than expected.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SlowLink {
    pub ranks: (usize, usize),
    /// Bytes per second in the slower direction.
    pub bandwidth: f64,
    /// Median bandwidth of the other links; of the only link, its bandwidth when the run started.
    pub expected: f64,
    /// The run has no other link between hosts.
    pub only: bool,
}

/// Pairs of ranks on different hosts that are neighbors in a process group. `hosts` has the host of each rank.
pub fn neighbors(mesh: &Mesh, hosts: &[usize]) -> Vec<(usize, usize)> {
    let mut pairs = Vec::new();
    for kind in GroupKind::ALL {
        for rank in 0..mesh.ranks() {
            let members = mesh.members(kind, rank);
            let next = members.iter().cycle().skip(1);
            pairs.extend(
                members.iter().zip(next).map(|(one, other)| (*one.min(other), *one.max(other))),
            );
        }
    }
    pairs.retain(|(one, other)| hosts[*one] != hosts[*other]);
    pairs.sort_unstable();
    pairs.dedup();
    pairs
}

/// Splits pairs into rounds in which each rank has at most one partner, so that the links of a round are measured at
/// the same time.
pub fn rounds(pairs: &[(usize, usize)]) -> Vec<Vec<(usize, usize)>> {
    let mut rounds: Vec<Vec<(usize, usize)>> = Vec::new();
    for pair in pairs {
        let busy = |other: &(usize, usize)| {
            [other.0, other.1].iter().any(|rank| [pair.0, pair.1].contains(rank))
        };
        match rounds.iter_mut().find(|round| !round.iter().any(busy)) {
            Some(round) => round.push(*pair),
            None => rounds.push(vec![*pair]),
        }
    }
    rounds
}

/// Bytes per second from this rank to its partner in each round; 0 if it has none. Collective.
pub fn measure(
    messages: &impl PointToPoint,
    me: usize,
    rounds: &[Vec<(usize, usize)>],
) -> Result<Vec<f64>> {
    let mut rates = Vec::with_capacity(rounds.len());
    for round in rounds {
        let partner = |(one, other): &(usize, usize)| match (*one == me, *other == me) {
            (true, _) => Some(*other),
            (_, true) => Some(*one),
            _ => None,
        };
        let rate = match round.iter().find_map(partner) {
            Some(peer) if me < peer => {
                let rate = send_rate(messages, peer)?;
                answer(messages, peer)?;
                rate
            }
            Some(peer) => {
                answer(messages, peer)?;
                send_rate(messages, peer)?
            }
            None => 0.0,
        };
        rates.push(rate);
    }
    Ok(rates)
}

/// Times messages of 1 byte and of 1 MiB until the peer acknowledges them. Takes the fastest try of each, which other
/// load disturbs least.
fn send_rate(messages: &impl PointToPoint, peer: usize) -> Result<f64> {
    let (message, mut acknowledgment) = (vec![0; MESSAGE], [0]);
    let mut best = [f64::INFINITY; 2];
    for (len, best) in [1, MESSAGE].into_iter().zip(&mut best) {
        for _ in 0..TRIES {
            let start = messages.now();
            messages.send(&message[..len], peer)?;
            messages.receive(&mut acknowledgment, peer)?;
            *best = best.min((messages.now() - start).as_secs_f64());
        }
    }
    let [round_trip, total] = best;
    Ok(MESSAGE as f64 / (total - round_trip).max(total / 10.0))
}

fn answer(messages: &impl PointToPoint, peer: usize) -> Result<()> {
    let mut message = vec![0; MESSAGE];
    for len in [1, MESSAGE] {
        for _ in 0..TRIES {
            messages.receive(&mut message[..len], peer)?;
            messages.send(&[0], peer)?;
        }
    }
    Ok(())
}

/// Links of all ranks, from the rates of each. Collective.
pub fn links(group: &Group, rounds: &[Vec<(usize, usize)>], rates: &[f64]) -> Result<Vec<Link>> {
    let mut all = vec![0.0; rates.len() * group.size()];
    group.all_gather(rates, &mut all)?;
    let rate = |rank: usize, round: usize| all[rank * rates.len() + round];
    let link = |round: usize, (one, other): (usize, usize)| Link {
        ranks: (one, other),
        forward: rate(one, round),
        reverse: rate(other, round),
    };
    let of = |(round, pairs): (usize, &Vec<(usize, usize)>)| -> Vec<Link> {
        pairs.iter().map(|pair| link(round, *pair)).collect()
    };
    Ok(rounds.iter().enumerate().flat_map(of).collect())
}

/// Slowest link, if it has less than a third of the expected bandwidth.
pub fn slow_link(links: &[Link], at_start: LinkCost) -> Option<SlowLink> {
    let slower = |link: &Link| link.forward.min(link.reverse);
    let slow = |link: &Link| {
        let others = links.iter().filter(|other| other.ranks != link.ranks);
        let mut rates: Vec<f64> = others.map(slower).collect();
        rates.sort_by(f64::total_cmp);
        let only = rates.is_empty();
        let expected = if only { at_start.bandwidth } else { rates[rates.len() / 2] };
        let bandwidth = slower(link);
        let slow = SlowLink { ranks: link.ranks, bandwidth, expected, only };
        (bandwidth < SLOW_FRACTION * expected).then_some(slow)
    };
    let fraction = |slow: &SlowLink| slow.bandwidth / slow.expected;
    links.iter().filter_map(slow).min_by(|a, b| fraction(a).total_cmp(&fraction(b)))
}

impl fmt::Display for SlowLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SlowLink { ranks: (one, other), bandwidth, expected, only } = *self;
        let (bandwidth, expected) = (gigabytes(bandwidth), gigabytes(expected));
        write!(f, "the link between rank {one} and rank {other} has {bandwidth} GB/s; ")?;
        match only {
            false => write!(f, "the other links have {expected} GB/s"),
            true => write!(f, "it had {expected} GB/s when the run started"),
        }
    }
}

/// GB/s with two significant digits: `0.11`, `1.2`, `12`.
fn gigabytes(rate: f64) -> String {
    let rate = rate / 1e9;
    let digits = if rate < 1.0 { 2 } else { usize::from(rate < 10.0) };
    format!("{rate:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_contain_each_pair_once_and_each_rank_at_most_once() {
        for mesh in [
            Mesh::ONE,
            Mesh { data: 2, shard: 2, ..Mesh::ONE },
            Mesh { data: 5, ..Mesh::ONE },
            Mesh { pipe: 2, data: 4, tensor: 2, shard: 4, ..Mesh::ONE },
        ] {
            let one_per_host: Vec<usize> = (0..mesh.ranks()).collect();
            let pairs = neighbors(&mesh, &one_per_host);
            assert_eq!(pairs.is_empty(), mesh.ranks() == 1);
            let rounds = rounds(&pairs);
            let mut all = rounds.concat();
            all.sort_unstable();
            assert_eq!(all, pairs);
            for round in rounds {
                let mut ranks: Vec<usize> =
                    round.iter().flat_map(|pair| [pair.0, pair.1]).collect();
                ranks.sort_unstable();
                let count = ranks.len();
                ranks.dedup();
                assert_eq!(ranks.len(), count);
            }
        }
        let ring = Mesh { data: 4, ..Mesh::ONE };
        assert_eq!(neighbors(&ring, &[0, 1, 2, 3]), [(0, 1), (0, 3), (1, 2), (2, 3)]);
        assert_eq!(neighbors(&ring, &[0, 0, 1, 1]), [(0, 3), (1, 2)]);
        assert_eq!(neighbors(&ring, &[0; 4]), []);
    }

    #[test]
    fn slow_link_is_found_and_described() {
        let at_start = LinkCost { latency: 1e-5, bandwidth: 1.2e9 };
        let link = |one, other, forward, reverse| Link {
            ranks: (one, other),
            forward: forward * 1e9,
            reverse: reverse * 1e9,
        };
        let cases = [
            ("equal links", vec![link(0, 1, 8.0, 7.0), link(1, 2, 9.0, 8.0)], None),
            (
                "one direction of one link",
                vec![
                    link(0, 1, 1.2, 1.1),
                    link(1, 2, 1.2, 1.3),
                    link(2, 3, 1.2, 0.11),
                    link(0, 3, 1.2, 1.2),
                ],
                Some(
                    "the link between rank 2 and rank 3 has 0.11 GB/s; the other links have 1.2 GB/s",
                ),
            ),
            (
                "half the bandwidth is not slow",
                vec![link(0, 1, 8.0, 8.0), link(1, 2, 4.0, 8.0), link(0, 2, 8.0, 8.0)],
                None,
            ),
            ("the only link, unchanged", vec![link(0, 1, 0.9, 1.0)], None),
            (
                "the only link, slower than at the start",
                vec![link(0, 1, 0.2, 1.0)],
                Some(
                    "the link between rank 0 and rank 1 has 0.20 GB/s; it had 1.2 GB/s when the run started",
                ),
            ),
        ];
        for (case, links, expected) in cases {
            let message = slow_link(&links, at_start).map(|slow| slow.to_string());
            assert_eq!(message.as_deref(), expected, "{case}");
        }
    }
}
