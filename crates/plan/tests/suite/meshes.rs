//! Process groups of a mesh.

use lockstep_plan::{GroupKind, Mesh};

/// All combinations of shard and expert degrees for up to 24 replicas.
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

/// All groups of a kind have the same size, also where the expert degree does not divide the shard degree: 10
/// replicas, shard=5, expert=2.
#[test]
fn expert_groups_have_equal_size() {
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
