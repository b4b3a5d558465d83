//! Links between hosts, measured when ranks wait and none of them is slow: what each carries, and which of them
//! carries much less than the others. A few megabytes per link, between steps. Inside a host a link is memory: when
//! it is slow a core is, and the times of the ranks tell.

use std::fmt;
use std::time::Instant;

use lockstep_comm::{Group, LinkCost, Result};
use lockstep_plan::{GroupKind, Mesh};

/// What two ranks send each other, whatever carries it.
pub trait Carry {
    fn send(&self, bytes: &[u8], to: usize) -> Result<()>;
    fn receive(&self, bytes: &mut [u8], from: usize) -> Result<()>;
}

impl Carry for Group {
    fn send(&self, bytes: &[u8], to: usize) -> Result<()> {
        Group::send(self, bytes, to)
    }

    fn receive(&self, bytes: &mut [u8], from: usize) -> Result<()> {
        Group::receive(self, bytes, from)
    }
}

const PIECE: usize = 1 << 20;
const TIMES: usize = 4;

/// A link is slow when it carries less than this share of what the others do.
const SHARE: f64 = 1.0 / 3.0;

/// Two ranks, and the bytes per second from the first to the second and back.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Link {
    pub ranks: (usize, usize),
    pub forth: f64,
    pub back: f64,
}

/// A link that carries much less than the others.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SlowLink {
    pub ranks: (usize, usize),
    /// Bytes per second, in the slower direction.
    pub carries: f64,
    /// What the others carry; or, where it is the only one, what it carried when the run started.
    pub expected: f64,
    pub only: bool,
}

/// Who exchanges something with whom on another host: neighbours in every group of the mesh. `hosts` has the host
/// of each rank.
pub fn neighbours(mesh: &Mesh, hosts: &[usize]) -> Vec<(usize, usize)> {
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

/// The same pairs in rounds, in each of which a rank has one partner at most: links are measured side by side.
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

/// Bytes per second from this rank to its partner in each round; 0 where it has none. All ranks call it.
pub fn measure(carry: &impl Carry, me: usize, rounds: &[Vec<(usize, usize)>]) -> Result<Vec<f64>> {
    let mut rates = Vec::with_capacity(rounds.len());
    for round in rounds {
        let partner = |(one, other): &(usize, usize)| match (*one == me, *other == me) {
            (true, _) => Some(*other),
            (_, true) => Some(*one),
            _ => None,
        };
        let rate = match round.iter().find_map(partner) {
            Some(peer) if me < peer => {
                let rate = timed(carry, peer)?;
                answer(carry, peer)?;
                rate
            }
            Some(peer) => {
                answer(carry, peer)?;
                timed(carry, peer)?
            }
            None => 0.0,
        };
        rates.push(rate);
    }
    Ok(rates)
}

/// Sends pieces and waits for a word after each. The best counts: what the link can do, not what else happened.
fn timed(carry: &impl Carry, peer: usize) -> Result<f64> {
    let (piece, mut word) = (vec![0; PIECE], [0]);
    let mut best = [f64::INFINITY; 2];
    for (len, best) in [1, PIECE].into_iter().zip(&mut best) {
        for _ in 0..TIMES {
            let begun = Instant::now();
            carry.send(&piece[..len], peer)?;
            carry.receive(&mut word, peer)?;
            *best = best.min(begun.elapsed().as_secs_f64());
        }
    }
    let [there_and_back, whole] = best;
    Ok(PIECE as f64 / (whole - there_and_back).max(whole / 10.0))
}

fn answer(carry: &impl Carry, peer: usize) -> Result<()> {
    let mut piece = vec![0; PIECE];
    for len in [1, PIECE] {
        for _ in 0..TIMES {
            carry.receive(&mut piece[..len], peer)?;
            carry.send(&[0], peer)?;
        }
    }
    Ok(())
}

/// All ranks' rates put together. All ranks call it.
pub fn links(group: &Group, rounds: &[Vec<(usize, usize)>], rates: &[f64]) -> Result<Vec<Link>> {
    let mut all = vec![0.0; rates.len() * group.size()];
    group.all_gather(rates, &mut all)?;
    let rate = |rank: usize, round: usize| all[rank * rates.len() + round];
    let link = |round: usize, (one, other): (usize, usize)| Link {
        ranks: (one, other),
        forth: rate(one, round),
        back: rate(other, round),
    };
    let of = |(round, pairs): (usize, &Vec<(usize, usize)>)| -> Vec<Link> {
        pairs.iter().map(|pair| link(round, *pair)).collect()
    };
    Ok(rounds.iter().enumerate().flat_map(of).collect())
}

/// The link that carries least, if it carries much less than the others.
pub fn slow_link(links: &[Link], at_start: LinkCost) -> Option<SlowLink> {
    let slower = |link: &Link| link.forth.min(link.back);
    let judged = |link: &Link| {
        let others = links.iter().filter(|other| other.ranks != link.ranks);
        let mut rates: Vec<f64> = others.map(slower).collect();
        rates.sort_by(f64::total_cmp);
        let only = rates.is_empty();
        let expected = if only { at_start.bandwidth } else { rates[rates.len() / 2] };
        let carries = slower(link);
        let slow = SlowLink { ranks: link.ranks, carries, expected, only };
        (carries < SHARE * expected).then_some(slow)
    };
    let share = |slow: &SlowLink| slow.carries / slow.expected;
    links.iter().filter_map(judged).min_by(|a, b| share(a).total_cmp(&share(b)))
}

impl fmt::Display for SlowLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SlowLink { ranks: (one, other), carries, expected, only } = *self;
        let (carries, expected) = (gigabytes(carries), gigabytes(expected));
        write!(f, "the link between rank {one} and rank {other} carries {carries} GB/s; ")?;
        match only {
            false => write!(f, "the others {expected}"),
            true => write!(f, "it carried {expected} when the run started"),
        }
    }
}

/// Two digits that count: `0.11`, `1.2`, `12`.
fn gigabytes(rate: f64) -> String {
    let rate = rate / 1e9;
    let digits = if rate < 1.0 { 2 } else { usize::from(rate < 10.0) };
    format!("{rate:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_has_one_round_and_no_rank_two_partners() {
        for mesh in [
            Mesh::ONE,
            Mesh { data: 2, shard: 2, ..Mesh::ONE },
            Mesh { data: 5, ..Mesh::ONE },
            Mesh { pipe: 2, data: 4, tensor: 2, shard: 4, ..Mesh::ONE },
        ] {
            let apart: Vec<usize> = (0..mesh.ranks()).collect();
            let pairs = neighbours(&mesh, &apart);
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
        assert_eq!(neighbours(&ring, &[0, 1, 2, 3]), [(0, 1), (0, 3), (1, 2), (2, 3)]);
        assert_eq!(neighbours(&ring, &[0, 0, 1, 1]), [(0, 3), (1, 2)]);
        assert_eq!(neighbours(&ring, &[0; 4]), []);
    }

    #[test]
    fn which_link_is_slow() {
        let at_start = LinkCost { latency: 1e-5, bandwidth: 1.2e9 };
        let link = |one, other, forth, back| Link {
            ranks: (one, other),
            forth: forth * 1e9,
            back: back * 1e9,
        };
        let cases = [
            ("all alike", vec![link(0, 1, 8.0, 7.0), link(1, 2, 9.0, 8.0)], None),
            (
                "one direction of one link",
                vec![
                    link(0, 1, 1.2, 1.1),
                    link(1, 2, 1.2, 1.3),
                    link(2, 3, 1.2, 0.11),
                    link(0, 3, 1.2, 1.2),
                ],
                Some("the link between rank 2 and rank 3 carries 0.11 GB/s; the others 1.2"),
            ),
            (
                "a half is no matter",
                vec![link(0, 1, 8.0, 8.0), link(1, 2, 4.0, 8.0), link(0, 2, 8.0, 8.0)],
                None,
            ),
            ("the only one, as it was", vec![link(0, 1, 0.9, 1.0)], None),
            (
                "the only one, since the start",
                vec![link(0, 1, 0.2, 1.0)],
                Some(
                    "the link between rank 0 and rank 1 carries 0.20 GB/s; it carried 1.2 when the run started",
                ),
            ),
        ];
        for (what, links, expected) in cases {
            let told = slow_link(&links, at_start).map(|slow| slow.to_string());
            assert_eq!(told.as_deref(), expected, "{what}");
        }
    }
}
