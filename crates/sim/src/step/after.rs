//! What comes after the last backward pass: sums of gradients, the optimizer, and telling others what was stepped.

use lockstep_plan::{Collective, GroupKind, Phase};

use super::inside::{BESIDE, sums_each};
use crate::case::Case;
use crate::cluster::Engine;
use crate::comm::Flows;
use crate::compute::optimizer;

/// By rank of the pipeline, in seconds.
pub(super) struct After {
    /// Sums over replicas.
    sums: Vec<f64>,
    /// Of a token table that both ends hold.
    tied: f64,
    step: Vec<f64>,
    spread: Vec<f64>,
}

impl After {
    pub fn new<'a>(case: &Case<'a>, flows: &mut Flows<'a>) -> After {
        let (mut sums, mut step, mut spread) = (Vec::new(), Vec::new(), Vec::new());
        let mut unseen = Flows::new(case.cluster);
        let mut before = None;
        for rank in 0..case.pipe() {
            let params = case.rank_params(rank);
            // Of all ranks, the exchanges of the first are shown; the same again costs the same.
            let list = if rank == 0 { &mut *flows } else { &mut unseen };
            let costs = match before {
                Some((same, costs)) if same == params => costs,
                _ => (
                    summed(case, params, list),
                    spread_out(case, params, list),
                    stepped(case, params),
                ),
            };
            before = Some((params, costs));
            sums.push(costs.0);
            spread.push(costs.1);
            step.push(costs.2);
        }
        After { sums, tied: tied(case, flows), step, spread }
    }

    /// Of the pipeline's first rank alone.
    pub fn first<'a>(case: &Case<'a>, flows: &mut Flows<'a>) -> After {
        let params = case.rank_params(0);
        After {
            sums: vec![summed(case, params, flows)],
            tied: tied(case, flows),
            step: vec![stepped(case, params)],
            spread: vec![spread_out(case, params, flows)],
        }
    }

    /// Of the sums, what a last backward pass of `backward` seconds does not hide, in which a message of `send`
    /// seconds may be on the same link. The bucket that is complete last has nothing to hide behind.
    pub fn exposed(&self, case: &Case, rank: usize, backward: f64, send: f64) -> f64 {
        let sums = self.sums[rank];
        let shared = case.pipeline().link(case.cluster) == case.replicas().link(case.cluster);
        let backward = if shared { (backward - send).max(0.0) } else { backward };
        let tied = if rank == 0 || rank + 1 == case.pipe() { self.tied } else { 0.0 };
        let stages = (case.layout().chunks * case.layers(rank)).max(1) as f64;
        match case.data_overlap() {
            true => {
                (sums - backward).max(sums / (stages + 1.0)) + BESIDE * sums.min(backward) + tied
            }
            false => sums + tied,
        }
    }

    pub fn step(&self, rank: usize) -> f64 {
        self.step[rank]
    }

    pub fn spread(&self, rank: usize) -> f64 {
        self.spread[rank]
    }
}

/// Gradients over the replicas: all of them, or to those who step them.
fn summed(case: &Case, params: [f64; 2], flows: &mut Flows) -> f64 {
    let (wire, zero) = (case.software().wire, case.layout().zero);
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
        if zero == 0 {
            let all = if shard.0 == GroupKind::Shard {
                (GroupKind::Copies, case.replicas())
            } else {
                shard
            };
            let times = pieces(case);
            let each = bytes / times;
            seconds += times * flows.add(all, Collective::AllReduce, Phase::Backward, each, times);
            continue;
        }
        let sum = if case.software().scatters {
            Collective::ReduceScatter
        } else {
            Collective::AllReduce
        };
        if zero < 3 && !sums_each(case) {
            seconds += flows.add(shard, sum, Phase::Backward, bytes, 1.0);
        }
        let own = bytes / case.mesh.shard as f64;
        seconds += flows.add(copies, Collective::AllReduce, Phase::Backward, own, 1.0);
    }
    seconds
}

/// In how many pieces gradients go: this program sums block by block, and the norm after them. Where others do so it is
/// in what their links reach.
fn pieces(case: &Case) -> f64 {
    match case.cluster.engine {
        Engine::Nccl => 1.0,
        Engine::Lockstep => (case.layout().chunks * case.layers(0) + 2) as f64,
    }
}

/// ZeRO-1 and 2: what one rank stepped reaches the others.
fn spread_out(case: &Case, params: [f64; 2], flows: &mut Flows) -> f64 {
    if !matches!(case.layout().zero, 1 | 2) {
        return 0.0;
    }
    let groups =
        [(GroupKind::Gather, case.shard()), (GroupKind::ExpertGather, case.same_experts())];
    let gather = |(kind, params): ((GroupKind, crate::GroupPlacement), f64)| {
        flows.add(kind, Collective::AllGather, Phase::Optimizer, params * case.width, 1.0)
    };
    groups.into_iter().zip(params).map(gather).sum()
}

fn stepped(case: &Case, [dense, expert]: [f64; 2]) -> f64 {
    let cut = |ranks: usize| if case.layout().zero > 0 { ranks as f64 } else { 1.0 };
    optimizer(case, dense / cut(case.mesh.shard) + expert / cut(case.mesh.expert_shard()))
}

/// The first and the last stage add up the gradients of their table.
fn tied(case: &Case, flows: &mut Flows) -> f64 {
    if !case.shape().tied || case.pipe() == 1 {
        return 0.0;
    }
    let stride = case.pipeline().stride * (case.pipe() - 1);
    let ends = (GroupKind::Ends, crate::GroupPlacement { members: 2, stride });
    let bytes = case.vocab * case.dim * case.software().wire;
    flows.add(ends, Collective::AllReduce, Phase::Optimizer, bytes, 1.0)
}
