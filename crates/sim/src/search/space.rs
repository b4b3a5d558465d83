//! The search space: all layouts that a model, its batch and a number of ranks allow. The rules here are cheap and
//! necessary; `Plan::resolve` rejects the invalid layouts that remain.

use lockstep_plan::context::{self, ContextKind};
use lockstep_plan::model::Shape;
use lockstep_plan::placement::permutations;
use lockstep_plan::schedule::ScheduleKind;
use lockstep_plan::{Axis, Layout, Mesh, Offload, Plan};

use super::candidate::{Candidate, KINDS, RECOMPUTES};
use crate::Cluster;

/// Maximum number of pipeline stages per rank.
pub const MOST_CHUNKS: usize = 8;

pub(super) fn divisors(whole: usize) -> Vec<usize> {
    let small = (1..=whole.isqrt()).filter(|divisor| whole.is_multiple_of(*divisor));
    let mut all: Vec<usize> = small.flat_map(|divisor| [divisor, whole / divisor]).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// All combinations of degrees, micro-batch and recomputation, with default ZeRO level, schedule and placement.
pub(super) fn groups(plan: &Plan, ranks: usize) -> Vec<Candidate> {
    let shape = &plan.model;
    let mut all = Vec::new();
    for tensor in divisors(ranks).into_iter().filter(|tensor| divides(shape, *tensor)) {
        for context in divisors(ranks / tensor) {
            let kinds = context_kinds(shape, tensor, context, plan.data.seq);
            for pipe in divisors(ranks / tensor / context) {
                let data = ranks / tensor / context / pipe;
                if pipe > shape.layers || !plan.train.global_batch.is_multiple_of(data) {
                    continue;
                }
                for &context_kind in &kinds {
                    let usual = Layout { offload: plan.layout.offload, ..default_layout() };
                    let degrees = Layout { data, tensor, context, context_kind, pipe, ..usual };
                    all.extend(with_batches(plan, ranks, degrees));
                }
            }
        }
    }
    all
}

fn with_batches(plan: &Plan, ranks: usize, degrees: Layout) -> Vec<Candidate> {
    let mut all = Vec::new();
    for expert in experts(&plan.model, degrees.data * degrees.context) {
        for micro_batch in divisors(plan.train.global_batch / degrees.data) {
            for sequence in [false, true] {
                let tokens = micro_batch * plan.data.seq / degrees.context;
                if sequence && (degrees.tensor == 1 || !tokens.is_multiple_of(degrees.tensor)) {
                    continue;
                }
                for recompute in RECOMPUTES {
                    let layout = Layout { expert, sequence, recompute, ..degrees.clone() };
                    all.push(Candidate { ranks, micro_batch, layout });
                }
            }
        }
    }
    all
}

fn default_layout() -> Layout {
    Layout {
        data: 1,
        zero: 0,
        shard: 1,
        keep_gathered: false,
        tensor: 1,
        sequence: false,
        context: 1,
        context_kind: ContextKind::Ring,
        pipe: 1,
        schedule: ScheduleKind::OneForwardOneBackward,
        chunks: 1,
        expert: 1,
        recompute: RECOMPUTES[0],
        offload: Offload::None,
        order: Mesh::ONE.order,
    }
}

fn divides(shape: &Shape, tensor: usize) -> bool {
    let keys = shape.kv_heads.is_multiple_of(tensor) || tensor.is_multiple_of(shape.kv_heads);
    let matrices = shape.heads.is_multiple_of(tensor) && shape.ffn.is_multiple_of(tensor);
    let lead = shape.lead.is_none_or(|lead| lead.ffn.is_multiple_of(tensor));
    keys && matrices && lead && tensor <= shape.vocab
}

fn context_kinds(shape: &Shape, tensor: usize, context: usize, seq: usize) -> Vec<ContextKind> {
    if context == 1 {
        return vec![ContextKind::Ring];
    }
    if shape.moe.is_some_and(|moe| moe.capacity.is_some()) {
        return Vec::new();
    }
    let here = |heads: usize| (heads / tensor).max(1);
    let (heads, keys) = (here(shape.heads), here(shape.kv_heads));
    let fits = |kind: &ContextKind| {
        // If `both` reduces to one of the two, that one is already in the list.
        let (ulysses, ring) = context::degrees(*kind, context, heads, keys);
        let both = *kind != ContextKind::Both || (ulysses > 1 && ring > 1);
        both && context::check(*kind, context, seq, heads, keys).is_ok()
    };
    KINDS.into_iter().filter(fits).collect()
}

fn experts(shape: &Shape, replicas: usize) -> Vec<usize> {
    match shape.moe {
        None => vec![1],
        Some(moe) => {
            let mut all = divisors(moe.experts);
            all.retain(|expert| replicas.is_multiple_of(*expert));
            all
        }
    }
}

/// A group with each schedule.
pub(super) fn scheduled(group: &Candidate, layers: usize, micros: usize) -> Vec<Candidate> {
    let with = |(schedule, chunks)| {
        let layout = Layout { schedule, chunks, ..group.layout.clone() };
        Candidate { layout, ..*group }
    };
    // Schedules with deferred weight gradients keep activations on the device.
    let offloads = group.layout.offload.activations();
    let all = schedules(group.layout.pipe, layers, micros).into_iter();
    all.filter(|(schedule, _)| !(offloads && schedule.splits())).map(with).collect()
}

/// A scheduled group with each ZeRO level.
pub(super) fn leaves(group: &Candidate) -> Vec<Candidate> {
    let with = |(zero, shard, keep_gathered)| {
        let layout = Layout { zero, shard, keep_gathered, ..group.layout.clone() };
        Candidate { layout, ..*group }
    };
    zeros(group.layout.data * group.layout.context).into_iter().map(with).collect()
}

fn schedules(pipe: usize, layers: usize, micros: usize) -> Vec<(ScheduleKind, usize)> {
    if pipe == 1 {
        return vec![(ScheduleKind::OneForwardOneBackward, 1)];
    }
    let mut all = vec![
        (ScheduleKind::OneForwardOneBackward, 1),
        (ScheduleKind::ZbH1, 1),
        (ScheduleKind::ZbH2, 1),
        (ScheduleKind::Gpipe, 1),
    ];
    if micros.is_multiple_of(pipe) {
        let most = MOST_CHUNKS.min(layers / pipe);
        all.extend((2..=most).map(|chunks| (ScheduleKind::Interleaved, chunks)));
    }
    all
}

/// ZeRO level, shard degree, and keep_gathered.
fn zeros(replicas: usize) -> Vec<(u8, usize, bool)> {
    let mut all = vec![(0, 1, false)];
    for shard in divisors(replicas).into_iter().rev().filter(|shard| *shard > 1) {
        all.extend([(1, shard, false), (2, shard, false), (3, shard, false), (3, shard, true)]);
    }
    all
}

/// The axis orders that differ in cost, the default first.
pub(super) fn orders(mesh: &Mesh, cluster: &Cluster) -> Vec<[Axis; 4]> {
    let mut seen: Vec<Vec<usize>> = Vec::new();
    let mut all = Vec::new();
    for order in permutations(Mesh::ONE.order) {
        let mesh = Mesh { order, ..*mesh };
        let far = distances(&mesh, cluster);
        if !seen.contains(&far) {
            seen.push(far);
            all.push(order);
        }
    }
    all
}

/// The properties of an order that costs depend on: for every axis, how many of its ranks each link connects. If ranks
/// differ, or if the cost formulas use hosts, the distance between its ranks.
fn distances(mesh: &Mesh, cluster: &Cluster) -> Vec<usize> {
    let exact = !cluster.even() || cluster.engine == crate::Engine::Lockstep;
    let mut far = Vec::new();
    let mut stride = 1;
    for axis in mesh.order.into_iter().rev() {
        let size = mesh.size(axis);
        if size > 1 {
            far.push(axis as usize);
            let joined = |span: usize| (span / stride).min(mesh.ranks());
            match exact {
                true => far.push(stride),
                false => far.extend(cluster.links.iter().filter_map(|link| link.span).map(joined)),
            }
        }
        stride *= size;
    }
    // Sorted by axis.
    let each =
        1 + if exact { 1 } else { cluster.links.iter().filter(|link| link.span.is_some()).count() };
    let mut by_axis: Vec<&[usize]> = far.chunks(each).collect();
    by_axis.sort_unstable();
    by_axis.concat()
}
