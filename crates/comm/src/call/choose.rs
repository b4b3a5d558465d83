//! Which algorithm to take: the one whose price, by the formulas beside the algorithms, is the least
//! on the links that it crosses. Pure, so that all members come to the same choice.

use crate::algo::{direct, flat, halving, ring, tree, two_level};
use crate::call::Algo;
use crate::call::cost::Traffic;
use crate::call::cut::Cut;
use lockstep_types::Collective;

/// What one kind of link costs.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LinkCost {
    /// Seconds from sending a small message to having it.
    pub latency: f64,
    /// Bytes per second of one stream.
    pub bandwidth: f64,
}

/// The constants of the price formulas: measured when a world starts, or given.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Constants {
    /// Through the memory of a host.
    pub local: LinkCost,
    /// Between hosts.
    pub remote: LinkCost,
}

impl Default for Constants {
    fn default() -> Constants {
        Constants {
            local: LinkCost { latency: 1e-6, bandwidth: 8e9 },
            remote: LinkCost { latency: 20e-6, bandwidth: 1.2e9 },
        }
    }
}

/// A collective as the formulas see it.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    pub kind: Collective,
    /// Elements, as in a call.
    pub count: usize,
    pub width: usize,
    pub root: usize,
    /// Which host each member is on, numbered from 0 in order of appearance.
    pub hosts: &'a [usize],
}

impl Shape<'_> {
    fn members(&self) -> usize {
        self.hosts.len()
    }

    fn host_count(&self) -> usize {
        self.hosts.iter().max().map_or(0, |h| h + 1)
    }

    /// The bytes that a member holds in the end or brings, whichever is more.
    fn bytes(&self) -> usize {
        let each = self.count * self.width;
        match self.kind {
            Collective::Gather | Collective::Scatter => each * self.members(),
            _ => each,
        }
    }

    fn cut(&self) -> Cut {
        Cut { count: self.bytes() / self.width, parts: self.members(), width: self.width }
    }
}

/// The algorithms that can carry out a collective on this topology.
pub fn candidates(shape: &Shape) -> Vec<Algo> {
    let one_host = shape.host_count() == 1;
    let even = two_level::even(shape.hosts);
    let possible = |algo: &Algo| match (algo, shape.kind) {
        (Algo::Direct, _) => one_host,
        (Algo::TwoLevel, Collective::AllGather | Collective::ReduceScatter) => even,
        _ => true,
    };
    Algo::of(shape.kind).iter().copied().filter(possible).collect()
}

/// The cheapest.
pub fn choose(shape: &Shape, constants: &Constants) -> Algo {
    let mut best = (f64::INFINITY, Algo::Flat);
    for algo in candidates(shape) {
        let seconds = price(shape, algo, constants);
        if seconds < best.0 {
            best = (seconds, algo);
        }
    }
    best.1
}

/// Messages and bytes that one member sends, exactly. `None` where it depends on more than the shape.
pub fn sent(shape: &Shape, algo: Algo, me: usize) -> Option<Traffic> {
    sent_if(shape, algo, me, false)
}

/// Like [`sent`]; `pulls` says that members of one host read each other's memory (see
/// [`crate::Group::pulls`]), which direct and two-level do where it pays. What they move through
/// slots or pull counts as sent; where buffers are reached in place they move less.
pub fn sent_if(shape: &Shape, algo: Algo, me: usize, pulls: bool) -> Option<Traffic> {
    if shape.members() == 1 {
        return Some(Traffic::default());
    }
    match algo {
        Algo::Direct => directly_sent(shape, me, pulls),
        Algo::TwoLevel => sent_on_two_levels(shape, me, pulls),
        Algo::Engine => None,
        _ => sent_in_messages(shape, algo, me),
    }
}

fn sent_in_messages(shape: &Shape, algo: Algo, me: usize) -> Option<Traffic> {
    let (n, cut, bytes, root) = (shape.members(), shape.cut(), shape.bytes(), shape.root);
    Some(match (shape.kind, algo) {
        (Collective::AllReduce, Algo::Ring) => {
            ring::all_reduce_sent(shape.count, shape.width, n, me)
        }
        (Collective::AllReduce, Algo::Halving) => {
            halving::reduce_scatter_sent(&cut, me) + halving::all_gather_sent(&cut, me)
        }
        (Collective::AllReduce, _) => tree::all_reduce_sent(shape.count, shape.width, me, n),
        (Collective::Reduce, Algo::Ring) => {
            ring::reduce_scatter_sent(&cut.parts(), me) + flat::collect_sent(&cut, me, root)
        }
        (Collective::Reduce, _) => tree::reduce_sent(bytes, root, me),
        (Collective::ReduceScatter, Algo::Halving) => halving::reduce_scatter_sent(&cut, me),
        (Collective::ReduceScatter, _) => ring::reduce_scatter_sent(&cut.parts(), me),
        (Collective::AllGather, Algo::Halving) => halving::all_gather_sent(&cut, me),
        (Collective::AllGather, _) => ring::all_gather_sent(&cut.parts(), me),
        (Collective::Broadcast, Algo::Ring) => ring::broadcast_sent(n, me, root, bytes),
        (Collective::Broadcast, _) => tree::broadcast_sent(bytes, root, me, n),
        (Collective::Gather, _) => flat::collect_sent(&cut, me, root),
        (Collective::Scatter, _) => flat::deal_sent(&cut, me, root),
        (Collective::AllToAll, _) => flat::all_to_all_sent(&cut, me),
        (Collective::Barrier, _) => halving::barrier_sent(n),
        (Collective::AllToAllV | Collective::SendRecv, _) => return None,
    })
}

fn directly_sent(shape: &Shape, me: usize, pulls: bool) -> Option<Traffic> {
    use direct::sent;
    let (parts, root) = (shape.cut().parts(), shape.root);
    Some(match shape.kind {
        Collective::AllReduce => sent::all_reduce(&parts, me, pulls),
        Collective::Reduce => sent::reduce(&parts, me, root, pulls),
        Collective::ReduceScatter => sent::reduce_scatter(&parts, me, pulls),
        Collective::AllGather => sent::all_gather(&parts, me, true, pulls),
        Collective::Gather => sent::all_gather(&parts, me, me == root, pulls),
        Collective::Broadcast => sent::broadcast(shape.bytes(), shape.members(), me, root, pulls),
        Collective::Scatter => sent::scatter(&parts, me, root, pulls),
        Collective::AllToAll => sent::all_to_all(&parts, me, pulls),
        Collective::Barrier => Traffic::default(),
        Collective::AllToAllV | Collective::SendRecv => return None,
    })
}

fn sent_on_two_levels(shape: &Shape, me: usize, pulls: bool) -> Option<Traffic> {
    let (cut, hosts, root) = (shape.cut(), shape.hosts, shape.root);
    Some(match shape.kind {
        Collective::AllReduce => two_level::all_reduce_sent(&cut, hosts, me, pulls),
        Collective::Reduce => two_level::reduce_sent(&cut, hosts, me, root, pulls),
        Collective::Broadcast => two_level::broadcast_sent(shape.bytes(), hosts, me, root, pulls),
        Collective::AllGather => two_level::all_gather_sent(&cut, hosts, me, pulls),
        Collective::ReduceScatter => two_level::reduce_scatter_sent(&cut, hosts, me, pulls),
        Collective::Barrier => two_level::barrier_sent(hosts, me),
        _ => return None,
    })
}

/// Seconds that a collective should take.
pub fn price(shape: &Shape, algo: Algo, constants: &Constants) -> f64 {
    let (n, hosts) = (shape.members(), shape.host_count());
    let bytes = shape.bytes() as f64;
    let link = if hosts > 1 { constants.remote } else { constants.local };
    let time =
        |steps: f64, sent: f64, link: &LinkCost| steps * link.latency + sent / link.bandwidth;
    let local = &constants.local;
    match algo {
        // Two meetings; the bytes pass through memory once in and once out.
        Algo::Direct => time(2.0, bytes, local),
        Algo::TwoLevel => {
            // The members of a host share its network link, so slices of S/L cost as much as S.
            let line_hosts: Vec<usize> = (0..hosts).collect();
            let line = Shape { hosts: &line_hosts, root: shape.hosts[shape.root], ..*shape };
            time(4.0, 2.0 * bytes, local) + price(&line, line_algo(shape.kind), constants)
        }
        Algo::Engine => f64::INFINITY,
        _ => {
            let most =
                (0..n).filter_map(|me| sent(shape, algo, me)).fold(Traffic::default(), |a, b| {
                    Traffic { messages: a.messages.max(b.messages), bytes: a.bytes.max(b.bytes) }
                });
            // A ring crosses each host's link once at a time; in the others every member of a host
            // may be on the network at once, and they share its link.
            let sharing = match algo {
                Algo::Ring => 1.0,
                _ if hosts > 1 => n as f64 / hosts as f64,
                _ => 1.0,
            };
            time(depth(shape, algo, most), most.bytes as f64 * sharing, &link)
        }
    }
}

/// How the second level of a two-level collective is carried out.
fn line_algo(kind: Collective) -> Algo {
    match kind {
        Collective::Broadcast | Collective::Reduce => Algo::Tree,
        Collective::Barrier => Algo::Halving,
        _ => Algo::Ring,
    }
}

/// Latencies that add up: the messages of a member, or for pipelines the length of the chain.
fn depth(shape: &Shape, algo: Algo, most: Traffic) -> f64 {
    let n = shape.members();
    let log = f64::from(n.next_power_of_two().ilog2());
    let chain = (n - 1) as f64;
    match (shape.kind, algo) {
        (Collective::AllReduce, Algo::Tree) => 2.0 * (log + most.messages as f64),
        (_, Algo::Tree) => log + most.messages as f64,
        (Collective::Broadcast, Algo::Ring) => chain + most.messages as f64,
        _ => most.messages as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(count: usize, hosts: &[usize]) -> Shape<'_> {
        Shape { kind: Collective::AllReduce, count, width: 4, root: 0, hosts }
    }

    #[test]
    fn memory_is_taken_where_there_is_one() {
        for count in [0, 1, 1 << 20] {
            assert_eq!(choose(&shape(count, &[0; 4]), &Constants::default()), Algo::Direct);
        }
    }

    #[test]
    fn small_buffers_go_in_few_steps_and_large_ones_with_few_bytes() {
        let apart: Vec<usize> = (0..16).collect();
        assert_eq!(choose(&shape(256, &apart), &Constants::default()), Algo::Halving);
        let sixteen = shape(64 << 20, &apart);
        let ring = price(&sixteen, Algo::Ring, &Constants::default());
        assert!(ring < price(&sixteen, Algo::Tree, &Constants::default()));
    }

    /// On the second level, the root is its host.
    #[test]
    fn a_root_past_the_number_of_hosts_has_a_price() {
        let hosts = [0, 0, 1, 1, 1];
        for kind in [Collective::Broadcast, Collective::Reduce] {
            for root in 0..hosts.len() {
                let shape = Shape { kind, count: 1000, width: 4, root, hosts: &hosts };
                assert!(candidates(&shape).contains(&choose(&shape, &Constants::default())));
            }
        }
    }

    #[test]
    fn several_members_per_host_meet_there_first() {
        let hosts = [0, 0, 0, 0, 1, 1, 1, 1];
        assert_eq!(choose(&shape(64 << 20, &hosts), &Constants::default()), Algo::TwoLevel);
    }
}
