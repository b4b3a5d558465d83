//! Duration of collectives on the links of a cluster. Knows the placement of ranks, but not the purpose of a collective.

mod exact;
mod flows;
mod in_memory;

pub use exact::traffic;
pub use flows::Flow;
pub(crate) use flows::Flows;

use lockstep_comm::{CollectiveShape, LinkCost, LinkCosts, choose, predict_seconds};
use lockstep_plan::Collective;

use crate::cluster::{Cluster, Engine};

/// Placement of a process group: number of members and distance in ranks between them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupPlacement {
    pub members: usize,
    pub stride: usize,
}

impl GroupPlacement {
    /// Members within `span` consecutive ranks.
    fn within(&self, span: usize) -> usize {
        (span / self.stride).clamp(1, self.members)
    }

    /// Index of the closest link that connects all members.
    pub fn link(&self, cluster: &Cluster) -> usize {
        let joins = |span: Option<usize>| span.is_none_or(|span| self.within(span) == self.members);
        cluster.links.iter().position(|link| joins(link.span)).unwrap_or(cluster.links.len() - 1)
    }
}

/// Seconds of one collective. `bytes` is the whole buffer of an all-reduce, all-gather or reduce-scatter, the data of
/// one member of an all-to-all, and the message of a send. All groups of a kind communicate at the same time and share
/// the links.
pub fn seconds(
    cluster: &Cluster,
    placement: GroupPlacement,
    collective: Collective,
    bytes: f64,
) -> f64 {
    if placement.members <= 1 || bytes <= 0.0 {
        return 0.0;
    }
    match (cluster.engine, collective) {
        (Engine::Shared | Engine::Staged, _) => {
            in_memory::seconds(cluster, placement, collective, bytes)
        }
        (_, Collective::SendRecv) => sent(cluster, placement, bytes),
        (Engine::Lockstep, _) => by_comm(cluster, placement, collective, bytes),
        (Engine::Nccl, Collective::AllToAll | Collective::AllToAllV) => {
            all_to_all(cluster, placement, bytes)
        }
        (Engine::Nccl, _) => around(cluster, placement, collective, bytes),
    }
}

/// A message to a neighbour, in the worst case over the farthest link of the group.
fn sent(cluster: &Cluster, placement: GroupPlacement, bytes: f64) -> f64 {
    let link = GroupPlacement { members: 2, ..placement }.link(cluster);
    cluster.links[link].hop() + bytes / cluster.bandwidth(link)
}

/// Rings over all rails. Every rank, and every boundary that the ring crosses, carries 2(n-1)/n of the bytes of an
/// all-reduce, half of that for the others. Members of a host share its rails. Latency is that of a ring inside a host;
/// between hosts that of a ring or, for an all-reduce, of a tree.
fn around(cluster: &Cluster, placement: GroupPlacement, collective: Collective, bytes: f64) -> f64 {
    let n = placement.members as f64;
    let far = placement.link(cluster);
    let (mut rate, mut inside, mut hops) = (f64::INFINITY, 1, 0.0);
    for (number, link) in cluster.links[..=far].iter().enumerate() {
        let joined = link.span.map_or(placement.members, |span| placement.within(span));
        if joined > inside {
            rate = rate.min(cluster.bandwidth(number) * inside as f64);
            // Groups of the level below that form the ring.
            let units = joined.div_ceil(inside) as f64;
            let ring = units - 1.0;
            let tree = 2.0 * units.log2().ceil();
            let steps = if number > 0 && collective == Collective::AllReduce {
                ring.min(tree)
            } else {
                ring
            };
            hops += steps * link.hop();
        }
        inside = joined;
    }
    // Short rings reach less bandwidth: 0.85 with two members, measured on NVSwitch.
    let filled = if far == 0 { 1.0 - 0.3 / n } else { 1.0 };
    let rounds = if collective == Collective::AllReduce { 2.0 } else { 1.0 };
    let waiting = cluster.links[far].start() + rounds * hops;
    let moving = rounds * (n - 1.0) / n * bytes / (rate * filled);
    // Small messages use NCCL's LL protocol: 1/5 of the latency, 1/8 of the bandwidth.
    (waiting + moving).min(0.2 * waiting + 8.0 * moving)
}

/// All-to-all: every level of links carries the traffic inside it, at the same time as the other levels.
fn all_to_all(cluster: &Cluster, placement: GroupPlacement, bytes: f64) -> f64 {
    let n = placement.members as f64;
    let far = placement.link(cluster);
    let (mut longest, mut inside) = (0.0_f64, 1);
    for (number, link) in cluster.links[..=far].iter().enumerate() {
        let joined = link.span.map_or(placement.members, |span| placement.within(span));
        let share = (joined - inside) as f64 / n;
        longest = longest.max(share * bytes / (ALL_TO_ALL_RATE * cluster.bandwidth(number)));
        inside = joined;
    }
    cluster.links[far].start() + cluster.links[far].hop() + longest
}

/// Bandwidth of an all-to-all relative to a ring on the same links: 537 of 606 GB/s, measured on B200s.
const ALL_TO_ALL_RATE: f64 = 0.89;

/// The cost formulas of `comm`, which has two levels: inside a host and between hosts.
fn by_comm(
    cluster: &Cluster,
    placement: GroupPlacement,
    collective: Collective,
    bytes: f64,
) -> f64 {
    let cost = |link: usize| LinkCost {
        latency: cluster.links[link].hop(),
        // The bandwidth of one stream; the formulas account for sharing.
        bandwidth: cluster.links[link].bandwidth_gbs * 1e9 / cluster.links[link].oversubscription,
    };
    let constants = LinkCosts { local: cost(0), remote: cost(cluster.links.len() - 1) };
    let hosts: Vec<usize> =
        (0..placement.members).map(|member| member * placement.stride / cluster.per_host).collect();
    let kind = match collective {
        Collective::AllToAllV | Collective::SendRecv => Collective::AllToAll,
        collective => collective,
    };
    let shape =
        CollectiveShape { kind, count: bytes.ceil() as usize, width: 1, root: 0, hosts: &hosts };
    predict_seconds(&shape, choose(&shape, &constants), &constants)
}
