//! Choice of the algorithm: the one with the lowest predicted time on the links that it uses, by the
//! cost formulas of the algorithms. Pure, so that all members make the same choice.

use crate::algo::{direct, flat, halving, ring, tree, two_level};
use crate::call::Algo;
use crate::call::partition::Partition;
use crate::call::topology::{host_count, is_even};
use crate::call::traffic::Traffic;
use lockstep_types::Collective;

#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LinkCost {
    /// Seconds from sending a small message to receiving it.
    pub latency: f64,
    /// Bytes per second of one stream.
    pub bandwidth: f64,
}

/// Link costs that the time predictions use: measured when a world starts, or given.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LinkCosts {
    /// Within a host.
    pub local: LinkCost,
    /// Between hosts.
    pub remote: LinkCost,
}

impl Default for LinkCosts {
    fn default() -> LinkCosts {
        LinkCosts {
            local: LinkCost { latency: 1e-6, bandwidth: 8e9 },
            remote: LinkCost { latency: 20e-6, bandwidth: 1.2e9 },
        }
    }
}

/// A collective as the cost formulas see it.
#[derive(Clone, Copy, Debug)]
pub struct CollectiveShape<'a> {
    pub kind: Collective,
    /// Number of elements, as in a call.
    pub count: usize,
    pub width: usize,
    pub root: usize,
    /// Host of each member, numbered from 0 in order of first appearance.
    pub hosts: &'a [usize],
}

impl CollectiveShape<'_> {
    fn members(&self) -> usize {
        self.hosts.len()
    }

    /// Bytes of the larger one of a member's input and output.
    fn bytes(&self) -> usize {
        let each = self.count * self.width;
        match self.kind {
            Collective::Gather | Collective::Scatter => each * self.members(),
            _ => each,
        }
    }

    fn partition(&self) -> Partition {
        Partition::of_bytes(self.bytes(), self.members(), self.width)
    }
}

/// The algorithms that support a collective on this topology.
pub fn candidates(shape: &CollectiveShape) -> Vec<Algo> {
    let one_host = host_count(shape.hosts) == 1;
    let even = is_even(shape.hosts);
    let supported = |algo: &Algo| match (algo, shape.kind) {
        (Algo::Direct, _) => one_host,
        (Algo::TwoLevel, Collective::AllGather | Collective::ReduceScatter) => even,
        _ => true,
    };
    Algo::of(shape.kind).iter().copied().filter(supported).collect()
}

/// The algorithm with the lowest predicted time.
pub fn choose(shape: &CollectiveShape, costs: &LinkCosts) -> Algo {
    let mut best = (f64::INFINITY, Algo::Flat);
    for algo in candidates(shape) {
        let seconds = predict_seconds(shape, algo, costs);
        if seconds < best.0 {
            best = (seconds, algo);
        }
    }
    best.1
}

/// How the members of one host access each other's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferAccess {
    /// All of them have mapped all buffers. In-place accesses do not count as sent.
    InPlace,
    /// The kernel copies large buffers between processes (see [`crate::Group::uses_cross_memory`]).
    CrossMemory,
    /// All bytes pass through slots of shared memory.
    Slots,
}

impl BufferAccess {
    /// The access of buffers that are too small for cross-memory.
    pub(crate) fn without_cross_memory(self) -> BufferAccess {
        if self == BufferAccess::CrossMemory { BufferAccess::Slots } else { self }
    }
}

/// Exact traffic of one member, through slots within a host. `None` if it depends on more than the shape.
pub fn predict_traffic(shape: &CollectiveShape, algo: Algo, me: usize) -> Option<Traffic> {
    predict_traffic_with(shape, algo, me, BufferAccess::Slots)
}

/// Like [`predict_traffic`], with the access that members of one host have to each other's buffers.
pub fn predict_traffic_with(
    shape: &CollectiveShape,
    algo: Algo,
    me: usize,
    access: BufferAccess,
) -> Option<Traffic> {
    if shape.members() == 1 {
        return Some(Traffic::default());
    }
    match algo {
        Algo::Direct => sent_directly(shape, me, access),
        Algo::TwoLevel => sent_on_two_levels(shape, me, access),
        Algo::Engine | Algo::Shared | Algo::Nccl => None,
        _ => sent_in_messages(shape, algo, me),
    }
}

fn sent_in_messages(shape: &CollectiveShape, algo: Algo, me: usize) -> Option<Traffic> {
    let (n, bytes, root) = (shape.members(), shape.bytes(), shape.root);
    let partition = shape.partition();
    Some(match (shape.kind, algo) {
        (Collective::AllReduce, Algo::Ring) => {
            ring::all_reduce_sent(shape.count, shape.width, n, me)
        }
        (Collective::AllReduce, Algo::Halving) => {
            halving::reduce_scatter_sent(&partition, me) + halving::all_gather_sent(&partition, me)
        }
        (Collective::AllReduce, _) => tree::all_reduce_sent(shape.count, shape.width, me, n),
        (Collective::Reduce, Algo::Ring) => {
            ring::reduce_scatter_sent(&partition.parts(), me)
                + flat::gather_sent(&partition, me, root)
        }
        (Collective::Reduce, _) => tree::reduce_sent(bytes, root, me),
        (Collective::ReduceScatter, Algo::Halving) => halving::reduce_scatter_sent(&partition, me),
        (Collective::ReduceScatter, _) => ring::reduce_scatter_sent(&partition.parts(), me),
        (Collective::AllGather, Algo::Halving) => halving::all_gather_sent(&partition, me),
        (Collective::AllGather, _) => ring::all_gather_sent(&partition.parts(), me),
        (Collective::Broadcast, Algo::Ring) => ring::broadcast_sent(n, me, root, bytes),
        (Collective::Broadcast, _) => tree::broadcast_sent(bytes, root, me, n),
        (Collective::Gather, _) => flat::gather_sent(&partition, me, root),
        (Collective::Scatter, _) => flat::scatter_sent(&partition, me, root),
        (Collective::AllToAll, _) => flat::all_to_all_sent(&partition, me),
        (Collective::Barrier, _) => halving::barrier_sent(n),
        (Collective::AllToAllV | Collective::SendRecv, _) => return None,
    })
}

fn sent_directly(shape: &CollectiveShape, me: usize, access: BufferAccess) -> Option<Traffic> {
    use direct::cost;
    let (parts, root) = (shape.partition().parts(), shape.root);
    Some(match shape.kind {
        Collective::AllReduce => cost::all_reduce(&parts, me, access),
        Collective::Reduce => cost::reduce(&parts, me, root, access),
        Collective::ReduceScatter => cost::reduce_scatter(&parts, me, access),
        Collective::AllGather => cost::all_gather(&parts, me, true, access),
        Collective::Gather => cost::all_gather(&parts, me, me == root, access),
        Collective::Broadcast => cost::broadcast(shape.bytes(), shape.members(), me, root, access),
        Collective::Scatter => cost::scatter(&parts, me, root, access),
        Collective::AllToAll => cost::all_to_all(&parts, me, access),
        Collective::Barrier => Traffic::default(),
        Collective::AllToAllV | Collective::SendRecv => return None,
    })
}

fn sent_on_two_levels(shape: &CollectiveShape, me: usize, access: BufferAccess) -> Option<Traffic> {
    let (partition, hosts, root) = (shape.partition(), shape.hosts, shape.root);
    Some(match shape.kind {
        Collective::AllReduce => two_level::all_reduce_sent(&partition, hosts, me, access),
        Collective::Reduce => two_level::reduce_sent(&partition, hosts, me, root, access),
        Collective::Broadcast => two_level::broadcast_sent(shape.bytes(), hosts, me, root, access),
        Collective::AllGather => two_level::all_gather_sent(&partition, hosts, me, access),
        Collective::ReduceScatter => two_level::reduce_scatter_sent(&partition, hosts, me, access),
        Collective::Barrier => two_level::barrier_sent(hosts, me),
        _ => return None,
    })
}

/// Predicted time of a collective, in seconds.
pub fn predict_seconds(shape: &CollectiveShape, algo: Algo, costs: &LinkCosts) -> f64 {
    let (n, hosts) = (shape.members(), host_count(shape.hosts));
    let bytes = shape.bytes() as f64;
    let link = if hosts > 1 { costs.remote } else { costs.local };
    let time =
        |steps: f64, sent: f64, link: &LinkCost| steps * link.latency + sent / link.bandwidth;
    let local = &costs.local;
    match algo {
        // Two barriers; the bytes are copied once in and once out.
        Algo::Direct => time(2.0, bytes, local),
        Algo::TwoLevel => {
            // The members of a host share its network link, so slices of S/L cost as much as S.
            let line_hosts: Vec<usize> = (0..hosts).collect();
            let line =
                CollectiveShape { hosts: &line_hosts, root: shape.hosts[shape.root], ..*shape };
            time(4.0, 2.0 * bytes, local) + predict_seconds(&line, line_algo(shape.kind), costs)
        }
        Algo::Engine | Algo::Shared | Algo::Nccl => f64::INFINITY,
        _ => {
            let sent = (0..n).filter_map(|me| predict_traffic(shape, algo, me));
            let most = sent.fold(Traffic::default(), |a, b| Traffic {
                messages: a.messages.max(b.messages),
                bytes: a.bytes.max(b.bytes),
            });
            // A ring uses each host's link once at a time; in the others all members of a host may
            // use the network at once, and they share its link.
            let sharing = match algo {
                Algo::Ring => 1.0,
                _ if hosts > 1 => n as f64 / hosts as f64,
                _ => 1.0,
            };
            time(depth(shape, algo, most), most.bytes as f64 * sharing, &link)
        }
    }
}

/// Algorithm of the second level of a two-level collective.
fn line_algo(kind: Collective) -> Algo {
    match kind {
        Collective::Broadcast | Collective::Reduce => Algo::Tree,
        Collective::Barrier => Algo::Halving,
        _ => Algo::Ring,
    }
}

/// Number of latencies that add up: the messages of a member, plus the length of the chain in pipelines.
fn depth(shape: &CollectiveShape, algo: Algo, most: Traffic) -> f64 {
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

    fn shape(count: usize, hosts: &[usize]) -> CollectiveShape<'_> {
        CollectiveShape { kind: Collective::AllReduce, count, width: 4, root: 0, hosts }
    }

    #[test]
    fn one_host_uses_shared_memory() {
        for count in [0, 1, 1 << 20] {
            assert_eq!(choose(&shape(count, &[0; 4]), &LinkCosts::default()), Algo::Direct);
        }
    }

    #[test]
    fn small_buffers_minimize_steps_and_large_ones_bytes() {
        let apart: Vec<usize> = (0..16).collect();
        assert_eq!(choose(&shape(256, &apart), &LinkCosts::default()), Algo::Halving);
        let sixteen = shape(64 << 20, &apart);
        let ring = predict_seconds(&sixteen, Algo::Ring, &LinkCosts::default());
        assert!(ring < predict_seconds(&sixteen, Algo::Tree, &LinkCosts::default()));
    }

    /// On the second level, the root is the index of its host.
    #[test]
    fn a_root_beyond_the_number_of_hosts_has_a_prediction() {
        let hosts = [0, 0, 1, 1, 1];
        for kind in [Collective::Broadcast, Collective::Reduce] {
            for root in 0..hosts.len() {
                let shape = CollectiveShape { kind, count: 1000, width: 4, root, hosts: &hosts };
                assert!(candidates(&shape).contains(&choose(&shape, &LinkCosts::default())));
            }
        }
    }

    #[test]
    fn several_members_per_host_use_two_levels() {
        let hosts = [0, 0, 0, 0, 1, 1, 1, 1];
        assert_eq!(choose(&shape(64 << 20, &hosts), &LinkCosts::default()), Algo::TwoLevel);
    }
}
