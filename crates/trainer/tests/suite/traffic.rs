//! Measured traffic equals the planned traffic, for each rank and process group.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use lockstep_comm::{
    Algo, CollectiveShape, Group, Options, Traffic, on_threads_with, predict_traffic,
};
use lockstep_kernels::Device;
use lockstep_plan::{Collective, GroupKind, Plan, PlannedCall, traffic, traffic_of_step};
use lockstep_trainer::Rank;

use crate::cuts::plan;
use crate::plans::source;

/// Traffic by group; `None` is the world.
pub type Sent = BTreeMap<Option<GroupKind>, Traffic>;

/// The first step differs: buffers are allocated in it.
pub const MEASURED_STEPS: RangeInclusive<u64> = 2..=3;

/// Traffic of a rank in all steps except the first.
pub fn measured(plan: &Plan, world: &Group) -> Sent {
    let source = source();
    let mut rank = Rank::new(plan, world, Device::from_env(1)).unwrap();
    rank.step(&source, 1).unwrap();
    let total = |rank: &Rank<'_>| -> Sent {
        let groups = rank.groups.traffic().map(|(kind, traffic)| (Some(kind), traffic));
        groups.chain([(None, rank.group.traffic())]).collect()
    };
    let before = total(&rank);
    for step in MEASURED_STEPS {
        rank.step(&source, step).unwrap();
    }
    let since = |(kind, after): (Option<GroupKind>, Traffic)| {
        let before = before[&kind];
        let messages = after.messages - before.messages;
        (kind, Traffic { messages, bytes: after.bytes - before.bytes })
    };
    total(&rank).into_iter().map(since).collect()
}

/// Traffic according to the plan. `of` gives the traffic of a collective for a rank's index in the group.
fn planned(plan: &Plan, rank: usize, of: impl Fn(&PlannedCall, usize) -> Traffic) -> Sent {
    let all = GroupKind::ALL.map(Some).into_iter().chain([None]);
    let mut sum: Sent = all.map(|kind| (kind, Traffic::default())).collect();
    for call in MEASURED_STEPS.flat_map(|step| traffic_of_step(plan, rank, step as usize)) {
        let me = call.kind.map_or(rank, |kind| {
            let kind = plan.mesh().members(kind, rank);
            kind.iter().position(|member| *member == rank).unwrap() % call.members
        });
        let (each, times) = (of(&call, me), call.times as u64);
        let sum = sum.get_mut(&call.kind).unwrap();
        *sum = *sum + Traffic { messages: times * each.messages, bytes: times * each.bytes };
    }
    sum
}

/// The collective of `comm`; `None` is a point-to-point message.
pub fn kind(collective: Collective) -> Option<Collective> {
    match collective {
        Collective::AllReduce => Some(Collective::AllReduce),
        Collective::AllGather => Some(Collective::AllGather),
        Collective::ReduceScatter => Some(Collective::ReduceScatter),
        Collective::AllToAll | Collective::AllToAllV => Some(Collective::AllToAll),
        _ => None,
    }
}

/// Traffic of one collective on one host.
fn on_one_host(call: &PlannedCall, me: usize) -> Traffic {
    let PlannedCall { members, count, width, .. } = *call;
    let Some(kind) = kind(call.collective) else {
        return Traffic { messages: 1, bytes: (count * width) as u64 };
    };
    let shape = CollectiveShape { kind, count, width, root: 0, hosts: &vec![0; members] };
    let sent = predict_traffic(&shape, Algo::Direct, me).unwrap();
    match call.collective {
        // Ranks exchange the counts first.
        Collective::AllToAllV => sent + Traffic { messages: 1, bytes: 8 * members as u64 },
        _ => sent,
    }
}

/// Compares the traffic of a rank with the plan, except in the group `open`, where it depends on the data.
pub fn compare(
    words: &str,
    rank: usize,
    measured: &Sent,
    open: Option<GroupKind>,
    of: impl Fn(&PlannedCall, usize) -> Traffic,
) {
    let plan = plan(words);
    let planned = planned(&plan, rank, of);
    let known = |kind: &Option<GroupKind>| kind.is_none() || *kind != open;
    for (kind, measured) in measured.iter().filter(|(kind, _)| known(kind)) {
        let name = kind.map_or("all ranks", GroupKind::name);
        let list: Vec<PlannedCall> =
            traffic(&plan, rank).into_iter().filter(|e| e.kind == *kind).collect();
        assert_eq!(*measured, planned[kind], "{words}: rank {rank}, group {name}: {list:#?}");
    }
}

fn matches_plan(layouts: &[&str]) {
    matches_plan_except(None, layouts);
}

fn matches_plan_except(open: Option<GroupKind>, layouts: &[&str]) {
    // Traffic is counted in the slots of shared memory; direct access between threads would bypass them.
    let options = Options { direct_access: false, ..Options::default() };
    for words in layouts {
        // Ranks that share a GPU use each other's memory and send nothing.
        let plan = plan(&format!("{words} comm.device_engine=host"));
        let ranks = on_threads_with(&options, plan.ranks, |world| measured(&plan, &world));
        for (rank, measured) in ranks.iter().enumerate() {
            compare(words, rank, measured, open, on_one_host);
        }
    }
}

#[test]
fn data_parallel_traffic_matches_the_plan() {
    matches_plan(&[
        "gpt2",
        "gpt2 data=2 comm.bucket_mb=0.05",
        "llama data=3 precision.compute=bf16 comm.bucket_mb=25",
        "gpt2 data=2 zero=1",
        "llama data=3 zero=1 precision.compute=bf16",
        "gpt2 data=2 zero=2",
        "llama data=4 zero=2 model.tied=true precision.compute=bf16",
        "gpt2 data=2 zero=3",
        "llama data=3 zero=3 model.tied=true precision.compute=bf16",
        "llama data=2 zero=3 keep_gathered=true",
        "llama data=2 zero=3 comm.overlap=true",
        "gpt2 data=4 zero=1 shard=2",
        "gpt2 data=4 zero=2 shard=2 precision.compute=bf16",
        "llama data=4 zero=3 shard=2 train.micro_batch=3",
        "gpt2 data=2 precision.gradients=bf16 comm.bucket_mb=0.05",
        "gpt2 data=4 zero=1 shard=2 precision.gradients=bf16",
        "llama data=4 zero=2 precision.gradients=bf16 precision.compute=bf16",
    ]);
}

#[test]
fn compressed_traffic_matches_the_plan() {
    matches_plan(&[
        "gpt2 data=2 comm.compression=bf16 comm.bucket_mb=0.05",
        "gpt2 data=3 comm.compression=f16 comm.bucket_mb=0.05",
        "llama data=2 comm.compression=int8 comm.bucket_mb=0.2",
        "llama data=2 comm.compression=int8 zero=2",
        "gpt2 data=2 tensor=2 comm.compression=int8",
        "llama data=2 tensor=2 zero=2 sequence=true comm.compression=int8",
        "gpt2 data=3 comm.compression=topk:0.01 comm.bucket_mb=0.05",
        "gpt2 data=3 comm.compression=topk:0.01 comm.bucket_mb=0.05 comm.compression_warmup=0",
    ]);
}

#[test]
fn tensor_parallel_traffic_matches_the_plan() {
    matches_plan(&[
        "gpt2 tensor=2",
        "gpt2 tensor=3 precision.compute=bf16 recompute=selective",
        "llama tensor=4 recompute=full",
        "gpt2 tensor=2 sequence=true",
        "llama tensor=4 sequence=true precision.compute=bf16 train.micro_batch=2",
        "llama tensor=2 sequence=true recompute=full",
        "gpt2 tensor=2 sequence=true recompute=selective model.dropout=0.1",
        "gpt2 tensor=2 sequence=true comm.overlap=true",
        "llama tensor=4 sequence=true comm.overlap=true recompute=selective precision.compute=bf16 train.micro_batch=3",
        "llama tensor=2 sequence=true comm.overlap=true recompute=full data=2 zero=2",
        "moe tensor=2 sequence=true comm.overlap=true",
    ]);
}

#[test]
fn context_parallel_traffic_matches_the_plan() {
    matches_plan(&[
        "gpt2 context=2",
        "llama context=3 precision.compute=bf16",
        "gpt2 context=2 context_kind=ulysses",
        "llama context=4 context_kind=ulysses train.micro_batch=2",
        "llama context=4 context_kind=both precision.compute=bf16 recompute=full",
        "llama tensor=2 context=2 sequence=true",
        "moe context=2 recompute=full",
        "moe context=2 context_kind=ulysses model.balance=batch",
    ]);
}

#[test]
fn pipeline_traffic_matches_the_plan() {
    matches_plan(&[
        "gpt2 pipe=2",
        "llama pipe=3 schedule=gpipe precision.compute=bf16",
        "llama pipe=2 chunks=2 model.tied=true",
        "gpt2 pipe=4 schedule=zb-h2",
        "llama pipe=2 schedule=zb-h1 tensor=2 sequence=true",
    ]);
}

/// Every token goes to every expert, so that the traffic does not depend on the data.
#[test]
fn expert_traffic_matches_the_plan() {
    matches_plan(&[
        "moe data=2 expert=2",
        "moe data=4 expert=2 precision.compute=bf16 model.shared_experts=1",
        "moe data=4 expert=4 recompute=selective",
        "moe data=2 expert=2 recompute=full model.balance=batch",
        "moe data=4 expert=2 zero=1",
        "moe data=4 expert=2 zero=2 shard=2",
        "moe data=4 expert=2 zero=3 precision.compute=bf16",
        "moe data=2 context=2 expert=4 zero=3",
        "moe tensor=2 sequence=true data=2 expert=2",
    ]);
}

/// With a data-dependent router or top-k compression, the traffic of all other groups is still known.
#[test]
fn traffic_of_other_groups_matches_the_plan_when_one_depends_on_the_data() {
    matches_plan_except(
        Some(GroupKind::Expert),
        &["moe data=2 expert=2 model.top_k=1", "moe data=4 expert=2 model.top_k=2 zero=3"],
    );
    matches_plan_except(
        Some(GroupKind::Shard),
        &["llama data=2 tensor=2 zero=2 comm.compression=topk:0.1"],
    );
}

#[test]
fn combined_axes_traffic_matches_the_plan() {
    matches_plan(&[
        "llama data=2 tensor=2 zero=1",
        "gpt2 data=2 pipe=2 zero=2",
        "llama data=2 pipe=2 zero=3 precision.compute=bf16",
        "gpt2 data=2 pipe=2 schedule=zb-h1 zero=2",
        "llama data=2 pipe=2 chunks=2 zero=3 keep_gathered=true",
        "gpt2 data=2 context=2 zero=3 precision.compute=bf16",
        "llama data=2 tensor=2 pipe=2 sequence=true zero=1 model.tied=true",
        "llama data=2 tensor=2 pipe=2 sequence=true model.tied=true precision.gradients=bf16",
        "llama tensor=2 context=2 pipe=2 zero=3 sequence=true precision.compute=bf16",
        "gpt2 data=2 tensor=2 pipe=2 zero=3 shard=1",
        "moe data=2 tensor=2 expert=2 pipe=2 zero=2",
    ]);
}
