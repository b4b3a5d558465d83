//! The plan's own traffic, exact to the byte, on the links of a cluster.

use lockstep_plan::{Axis, Collective, GroupKind, Mesh, Plan, PlannedCall};

use super::{Flow, GroupPlacement, seconds};
use crate::cluster::Cluster;

/// Communication of a rank in one optimizer step of this program, with the time of each collective in isolation.
pub fn traffic(plan: &Plan, cluster: &Cluster, rank: usize) -> Vec<Flow> {
    let mesh = plan.mesh();
    lockstep_plan::traffic(plan, rank).iter().map(|call| flow(&mesh, cluster, call)).collect()
}

fn flow(mesh: &Mesh, cluster: &Cluster, call: &PlannedCall) -> Flow {
    let PlannedCall { kind, members, collective, count, width, phase, times } = *call;
    let placement =
        GroupPlacement { members, stride: kind.map_or(1, |kind| stride(mesh, kind, members)) };
    // The plan counts an all-to-all by the data of all members together.
    let together = if collective == Collective::AllToAll { members } else { 1 };
    let bytes = (count * width) as f64 / together as f64;
    let seconds = seconds(cluster, placement, collective, bytes);
    let link = placement.link(cluster);
    Flow { kind, members, collective, phase, bytes, times: times as f64, link, seconds }
}

/// Distance in ranks between members of a group.
fn stride(mesh: &Mesh, kind: GroupKind, members: usize) -> usize {
    let of = |axis: Axis| {
        let at = mesh.order.iter().position(|other| *other == axis).unwrap_or(0);
        mesh.order[at + 1..].iter().map(|inner| mesh.size(*inner)).product::<usize>()
    };
    let replicas = match (mesh.data, mesh.context) {
        (_, 1) => of(Axis::Data),
        (1, _) => of(Axis::Context),
        _ => of(Axis::Data).min(of(Axis::Context)),
    };
    match kind {
        GroupKind::Tensor | GroupKind::Keys => of(Axis::Tensor),
        // Ulysses groups are neighbours; rings connect these groups.
        GroupKind::Context if members == mesh.ulysses => of(Axis::Context),
        GroupKind::Context => of(Axis::Context) * mesh.ulysses,
        GroupKind::Pipe => of(Axis::Pipe),
        GroupKind::Ends => of(Axis::Pipe) * (mesh.pipe - 1),
        GroupKind::Replicas | GroupKind::Shard | GroupKind::Gather | GroupKind::Expert => replicas,
        GroupKind::Copies => replicas * mesh.shard,
        GroupKind::ExpertShard | GroupKind::ExpertGather => replicas * mesh.expert,
        GroupKind::ExpertCopies => replicas * mesh.expert * mesh.expert_shard(),
    }
}
