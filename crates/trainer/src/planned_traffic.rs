//! Planned traffic of a rank: the calls of the plan, each with the algorithm that its group chooses on these hosts.

use lockstep_comm::{
    Algo, BufferAccess, Collective, CollectiveShape, Group, choose, number_hosts,
    predict_traffic_with,
};
use lockstep_plan::{GroupKind, Plan, PlannedCall, traffic_of_step};

/// Bytes of one step of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PlannedTraffic {
    /// Bytes that the rank sends, if ranks of one host access each other's buffers in place. For experts and top-k
    /// compression between shards they depend on the data; tokens and elements are assumed to be evenly distributed.
    pub sent: u64,
    /// Bytes that it would send if every rank were on its own host.
    pub volume: u64,
}

/// Traffic of this rank in a step, counted from 1.
pub fn planned_traffic(plan: &Plan, world: &Group, step: u64) -> PlannedTraffic {
    let mut all = PlannedTraffic::default();
    for call in traffic_of_step(plan, world.rank(), step as usize) {
        let each = planned_call(plan, world, &call);
        all.sent += call.times as u64 * each.sent;
        all.volume += call.times as u64 * each.volume;
    }
    all
}

/// Traffic of one call.
pub fn planned_call(plan: &Plan, world: &Group, call: &PlannedCall) -> PlannedTraffic {
    let PlannedCall { kind, members, count, width, .. } = *call;
    let collective = match call.collective {
        Collective::SendRecv => {
            let bytes = (count * width) as u64;
            return PlannedTraffic { sent: bytes, volume: bytes };
        }
        Collective::AllToAllV => Collective::AllToAll,
        collective => collective,
    };
    let (ranks, me) = call_members(plan, world.rank(), kind, members);
    let hosts = number_hosts(ranks.iter().map(|rank| world.hosts()[*rank]));
    let apart: Vec<usize> = (0..members).collect();
    let bytes = |hosts: &[usize], algo: Option<Algo>| {
        let shape = CollectiveShape { kind: collective, count, width, root: 0, hosts };
        let algo = algo.unwrap_or_else(|| choose(&shape, &world.link_costs()));
        let traffic = predict_traffic_with(&shape, algo, me, BufferAccess::InPlace);
        traffic.map_or(0, |traffic| traffic.bytes)
    };
    let ring = if collective == Collective::AllToAll { Algo::Flat } else { Algo::Ring };
    PlannedTraffic { sent: bytes(&hosts, None), volume: bytes(&apart, Some(ring)) }
}

/// The ranks that take part in a call, and the index of `rank` among them.
fn call_members(
    plan: &Plan,
    rank: usize,
    kind: Option<GroupKind>,
    members: usize,
) -> (Vec<usize>, usize) {
    let all = match kind {
        Some(kind) => plan.mesh().members(kind, rank),
        None => (0..plan.ranks).collect(),
    };
    let me = all.iter().position(|member| *member == rank).expect("a rank is in its groups");
    // Ulysses groups are neighbours of the context group.
    let first = me / members * members;
    (all[first..first + members].to_vec(), me - first)
}
