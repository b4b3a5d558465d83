//! The communication matrix of a step. Consecutive ranks are merged if there are many.

use lockstep_plan::{Collective, Coord, GroupKind, Mesh};

use crate::Flow;
use crate::search::Proposal;

/// Bytes per step between (groups of) ranks.
#[derive(Clone, PartialEq, Debug)]
pub struct Cells {
    /// Ranks per row and column.
    pub each: usize,
    pub side: usize,
    pub bytes: Vec<f64>, // (side, side): from row to column
}

/// The communication matrix with at most `most` rows. Ring traffic goes to the next member; an all-to-all goes to all
/// members equally.
pub fn matrix(proposal: &Proposal, most: usize) -> Cells {
    let mesh = proposal.plan.mesh();
    let ranks = mesh.ranks();
    let each = ranks.div_ceil(most.max(1));
    let side = ranks.div_ceil(each);
    let mut bytes = vec![0.0; side * side];
    for rank in 0..ranks {
        for flow in &proposal.estimate.flows {
            let to = targets(&mesh, flow, rank);
            for other in &to {
                bytes[rank / each * side + other / each] += flow.sent() / to.len() as f64;
            }
        }
    }
    Cells { each, side, bytes }
}

/// The ranks to which a rank sends its data of a flow.
fn targets(mesh: &Mesh, flow: &Flow, rank: usize) -> Vec<usize> {
    let Some(of_flow) = flow.kind else { return vec![(rank + 1) % mesh.ranks()] };
    let kind = members(mesh, of_flow, rank);
    let Some(at) = kind.iter().position(|member| *member == rank).filter(|_| kind.len() > 1) else {
        return Vec::new();
    };
    match flow.collective {
        Collective::AllToAll | Collective::AllToAllV => {
            kind.iter().copied().filter(|member| *member != rank).collect()
        }
        // Forward to the next stage, backward to the previous one.
        Collective::SendRecv if of_flow == GroupKind::Pipe => {
            let next = match flow.phase {
                lockstep_plan::Phase::Forward => at.checked_add(1),
                _ => at.checked_sub(1),
            };
            next.and_then(|next| kind.get(next)).copied().into_iter().collect()
        }
        _ => vec![kind[(at + 1) % kind.len()]],
    }
}

/// Members of a rank's group, computed from its coordinates. `Mesh::members` visits every rank and is slower.
fn members(mesh: &Mesh, kind: GroupKind, rank: usize) -> Vec<usize> {
    let own = mesh.coord(rank);
    let replica = mesh.replica(own);
    let of_replicas = |all: Vec<usize>| -> Vec<usize> {
        let place = |replica: usize| Coord {
            data: replica / mesh.context,
            context: replica % mesh.context,
            ..own
        };
        all.into_iter().map(|replica| mesh.rank(place(replica))).collect()
    };
    let run = |length: usize| {
        (replica / length * length..(replica / length + 1) * length).collect::<Vec<_>>()
    };
    let every = |step: usize| (replica % step..mesh.replicas()).step_by(step).collect::<Vec<_>>();
    match kind {
        GroupKind::Tensor | GroupKind::Keys => {
            (0..mesh.tensor).map(|tensor| mesh.rank(Coord { tensor, ..own })).collect()
        }
        GroupKind::Context => {
            (0..mesh.context).map(|context| mesh.rank(Coord { context, ..own })).collect()
        }
        GroupKind::Pipe => (0..mesh.pipe).map(|pipe| mesh.rank(Coord { pipe, ..own })).collect(),
        GroupKind::Ends => {
            let ends = [0, mesh.pipe - 1];
            let there = ends.contains(&own.pipe) && mesh.pipe > 1;
            ends.into_iter()
                .filter(|_| there)
                .map(|pipe| mesh.rank(Coord { pipe, ..own }))
                .collect()
        }
        GroupKind::Replicas => of_replicas((0..mesh.replicas()).collect()),
        GroupKind::Shard | GroupKind::Gather => of_replicas(run(mesh.shard)),
        // Without ZeRO, all replicas are copies.
        GroupKind::Copies => of_replicas(every(mesh.shard)),
        GroupKind::Expert => of_replicas(run(mesh.expert)),
        GroupKind::ExpertShard | GroupKind::ExpertGather | GroupKind::ExpertCopies => {
            of_replicas(every(mesh.expert))
        }
    }
}
