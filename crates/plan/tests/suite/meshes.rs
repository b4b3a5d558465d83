//! Circles of ranks.

use lockstep_plan::{GroupKind, Mesh};

/// All that ZeRO and experts can make of up to 24 replicas.
fn meshes() -> Vec<Mesh> {
    let divisors = |whole: usize| (1..=whole).filter(move |n| whole.is_multiple_of(*n));
    let mut meshes = Vec::new();
    for data in 1..=24 {
        for (shard, expert) in divisors(data).flat_map(|s| divisors(data).map(move |e| (s, e))) {
            meshes.push(Mesh { data, shard, expert, ..Mesh::ONE });
        }
    }
    meshes
}

/// Who cuts something among them must be as many as it is cut for: 5 of 10 ranks share states, which two
/// experts do not divide.
#[test]
fn circles_of_experts_are_even() {
    for mesh in meshes() {
        let expected = [
            (GroupKind::Shard, mesh.shard),
            (GroupKind::Copies, mesh.data / mesh.shard),
            (GroupKind::Expert, mesh.expert),
            (GroupKind::ExpertShard, mesh.expert_shard()),
            (GroupKind::ExpertCopies, mesh.data / (mesh.expert * mesh.expert_shard())),
        ];
        for rank in 0..mesh.ranks() {
            for (kind, size) in expected {
                assert_eq!(mesh.members(kind, rank).len(), size, "{kind:?} of {rank}, {mesh:?}");
            }
        }
    }
}
