//! Communication and compute after the last backward pass: gradient reductions, the optimizer, and the all-gather of
//! updated parameters.

use lockstep_plan::reduction::Gather;
use lockstep_plan::{Collective, GroupKind, Phase};

use super::inside::{OVERLAP_COST, reduces_inside};
use crate::case::Case;
use crate::cluster::Engine;
use crate::comm::Flows;
use crate::compute::optimizer;

/// Seconds by rank of the pipeline.
pub(super) struct After {
    /// Gradient reductions over replicas.
    reductions: Vec<f64>,
    /// The sum of a token table that both ends hold.
    tied: f64,
    step: Vec<f64>,
    gather: Vec<f64>,
}

impl After {
    pub fn new<'a>(case: &Case<'a>, flows: &mut Flows<'a>) -> After {
        let (mut reductions, mut step, mut gather) = (Vec::new(), Vec::new(), Vec::new());
        let mut unseen = Flows::new(case.cluster);
        let mut before = None;
        for rank in 0..case.pipe() {
            let params = case.rank_params(rank);
            // Only the communication of the first rank is listed. Equal ranks cost the same.
            let list = if rank == 0 { &mut *flows } else { &mut unseen };
            let costs = match before {
                Some((same, costs)) if same == params => costs,
                _ => (
                    reduce(case, params, list),
                    gather_updated(case, params, list),
                    optimizer_step(case, params),
                ),
            };
            before = Some((params, costs));
            reductions.push(costs.0);
            gather.push(costs.1);
            step.push(costs.2);
        }
        After { reductions, tied: tied(case, flows), step, gather }
    }

    /// The pipeline's first rank alone.
    pub fn first<'a>(case: &Case<'a>, flows: &mut Flows<'a>) -> After {
        let params = case.rank_params(0);
        After {
            reductions: vec![reduce(case, params, flows)],
            tied: tied(case, flows),
            step: vec![optimizer_step(case, params)],
            gather: vec![gather_updated(case, params, flows)],
        }
    }

    /// Reductions that are not overlapped by the last backward pass of `backward` seconds, in which a message of `send`
    /// seconds may use the same link. Nothing overlaps with the last bucket.
    pub fn exposed(&self, case: &Case, rank: usize, backward: f64, send: f64) -> f64 {
        let reductions = self.reductions[rank];
        let shared = case.pipeline().link(case.cluster) == case.replicas().link(case.cluster);
        let backward = if shared { (backward - send).max(0.0) } else { backward };
        let tied = if rank == 0 || rank + 1 == case.pipe() { self.tied } else { 0.0 };
        let stages = (case.layout().chunks * case.layers(rank)).max(1) as f64;
        match case.overlaps() {
            true => {
                let exposed = (reductions - backward).max(reductions / (stages + 1.0));
                exposed + OVERLAP_COST * reductions.min(backward) + tied
            }
            false => reductions + tied,
        }
    }

    pub fn step(&self, rank: usize) -> f64 {
        self.step[rank]
    }

    /// The all-gather of updated parameters.
    pub fn gather(&self, rank: usize) -> f64 {
        self.gather[rank]
    }
}

/// Gradient reductions over the replicas, without those inside the passes.
fn reduce(case: &Case, params: [f64; 2], flows: &mut Flows) -> f64 {
    let Some(reduce) = case.policy.reduce else { return 0.0 };
    let wire = case.software().wire;
    let groups = [
        ((GroupKind::Shard, case.shard()), (GroupKind::Copies, case.copies())),
        (
            (GroupKind::ExpertShard, case.same_experts()),
            (GroupKind::ExpertCopies, crate::GroupPlacement { members: 1, stride: 1 }),
        ),
    ];
    let mut seconds = 0.0;
    for ((shard, copies), params) in groups.into_iter().zip(params) {
        let bytes = params * wire;
        if !reduce.shards {
            let all = if shard.0 == GroupKind::Shard {
                (GroupKind::Copies, case.replicas())
            } else {
                shard
            };
            let times = buckets(case, bytes);
            let each = bytes / times;
            seconds += times * flows.add(all, Collective::AllReduce, Phase::Backward, each, times);
            continue;
        }
        if !reduces_inside(case) {
            seconds += flows.add(shard, reduce.collective, Phase::Backward, bytes, 1.0);
        }
        let own = bytes / case.mesh.shard as f64;
        seconds += flows.add(copies, Collective::AllReduce, Phase::Backward, own, 1.0);
    }
    seconds
}

/// The number of buckets of whole gradients: at most one per block. The overhead of other programs' buckets is part of
/// the bandwidth that their links reach.
fn buckets(case: &Case, bytes: f64) -> f64 {
    let blocks = (case.layout().chunks * case.layers(0) + 2) as f64;
    match case.cluster.engine {
        Engine::Nccl => 1.0,
        Engine::Lockstep | Engine::Shared | Engine::Staged => {
            (bytes / case.plan.comm.bucket_bytes as f64).ceil().clamp(1.0, blocks)
        }
    }
}

/// The all-gather of updated parameters.
fn gather_updated(case: &Case, params: [f64; 2], flows: &mut Flows) -> f64 {
    if case.policy.gather != Gather::AfterOptimizer {
        return 0.0;
    }
    let groups =
        [(GroupKind::Gather, case.shard()), (GroupKind::ExpertGather, case.same_experts())];
    let gather = |(kind, params): ((GroupKind, crate::GroupPlacement), f64)| {
        flows.add(kind, Collective::AllGather, Phase::Optimizer, params * case.width, 1.0)
    };
    groups.into_iter().zip(params).map(gather).sum()
}

fn optimizer_step(case: &Case, [dense, expert]: [f64; 2]) -> f64 {
    let sharded = case.policy.gather.shards_optimizer();
    let cut = |ranks: usize| if sharded { ranks as f64 } else { 1.0 };
    optimizer(case, dense / cut(case.mesh.shard) + expert / cut(case.mesh.expert_shard()))
}

/// The first and the last stage sum the gradients of a tied token table.
fn tied(case: &Case, flows: &mut Flows) -> f64 {
    if !case.shape().tied || case.pipe() == 1 {
        return 0.0;
    }
    let stride = case.pipeline().stride * (case.pipe() - 1);
    let ends = (GroupKind::Ends, crate::GroupPlacement { members: 2, stride });
    let bytes = case.vocab * case.dim * case.software().wire;
    flows.add(ends, Collective::AllReduce, Phase::Optimizer, bytes, 1.0)
}
