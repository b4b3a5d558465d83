//! A rank executes the gathers, releases and reductions of its reduction policy, in order.

use std::collections::BTreeMap;

use lockstep_comm::{World, on_threads};
use lockstep_kernels::Device;
use lockstep_plan::reduction::{RankReductions, StateOp};
use lockstep_plan::{GroupKind, Plan};
use lockstep_trainer::Rank;

use crate::cuts::plan;
use crate::plans::source;

/// ZeRO levels, hybrid sharding, buckets, `keep_gathered` and bf16 gradients, with and without overlap.
const REPLICAS: [&str; 20] = [
    "gpt2",
    "gpt2 data=2",
    "gpt2 data=2 comm.bucket_mb=0.05",
    "llama data=2 comm.bucket_mb=0.05 comm.overlap=true",
    "gpt2 data=3 precision.gradients=bf16 comm.bucket_mb=0.05",
    "gpt2 data=2 zero=1",
    "gpt2 data=2 zero=1 comm.overlap=true",
    "llama data=4 zero=1 shard=2 precision.gradients=bf16",
    "gpt2 data=2 zero=2",
    "gpt2 data=2 zero=2 comm.overlap=true train.micro_batch=2",
    "llama data=4 zero=2 shard=2 model.tied=true",
    "gpt2 data=2 zero=2 train.micro_batch=6",
    "gpt2 data=2 zero=3",
    "llama data=3 zero=3 model.tied=true precision.compute=bf16",
    "llama data=2 zero=3 comm.overlap=true",
    "gpt2 data=2 zero=3 comm.overlap=true train.micro_batch=6",
    "llama data=4 zero=3 shard=2 comm.overlap=true",
    "llama data=2 zero=3 keep_gathered=true",
    "gpt2 data=2 zero=3 keep_gathered=true comm.overlap=true recompute=full",
    "llama data=2 context=2 zero=3 keep_gathered=true train.micro_batch=6",
];

/// Schedules with whole and with split backward passes.
const PIPELINES: [&str; 10] = [
    "gpt2 pipe=2",
    "gpt2 data=2 pipe=2 comm.bucket_mb=0.05",
    "gpt2 data=2 pipe=2 schedule=zb-h1 comm.overlap=true",
    "gpt2 data=2 pipe=2 schedule=zb-h1 zero=2",
    "llama data=2 pipe=2 schedule=zb-h1 zero=3 comm.overlap=true",
    "llama data=2 pipe=2 schedule=gpipe zero=1",
    "llama data=2 pipe=2 schedule=gpipe zero=3 comm.overlap=true",
    "llama data=2 pipe=2 chunks=2 zero=3 keep_gathered=true",
    "gpt2 data=2 pipe=2 chunks=2 zero=3 model.tied=true",
    "llama data=2 pipe=2 schedule=zb-h1 zero=3 keep_gathered=true model.tied=true",
];

/// Sums over other axes: norms, shared key heads, tied tables.
const SHARED: [&str; 7] = [
    "gpt2 tensor=2 sequence=true",
    "gpt2 data=2 tensor=2 sequence=true zero=1",
    "llama data=2 tensor=4 sequence=true zero=3 train.micro_batch=3",
    "llama tensor=4 pipe=2 model.tied=true train.micro_batch=3",
    "gpt2 data=2 tensor=2 pipe=2 sequence=true zero=2 train.micro_batch=3",
    "llama data=2 tensor=2 pipe=2 schedule=zb-h1 zero=1 comm.overlap=true train.micro_batch=3",
    "gpt2 tensor=2 context=2 sequence=true zero=3 train.micro_batch=3",
];

const EXPERTS: [&str; 8] = [
    "moe data=2 expert=2",
    "moe data=4 expert=2",
    "moe data=4 expert=2 zero=1 comm.overlap=true",
    "moe data=4 expert=2 zero=2 shard=2",
    "moe data=4 expert=2 zero=3",
    "moe data=2 expert=2 zero=3 keep_gathered=true",
    "moe data=2 context=2 expert=4 zero=3 comm.overlap=true",
    "moe data=2 expert=2 pipe=2 schedule=zb-h1 zero=2 precision.gradients=bf16",
];

/// Groups that communicate only parameters and gradients.
const GROUPS: [GroupKind; 8] = [
    GroupKind::Keys,
    GroupKind::Ends,
    GroupKind::Shard,
    GroupKind::Gather,
    GroupKind::Copies,
    GroupKind::ExpertShard,
    GroupKind::ExpertGather,
    GroupKind::ExpertCopies,
];

/// Name of the collective and bytes, by group and in order.
type Calls = BTreeMap<GroupKind, Vec<(&'static str, u64)>>;

#[test]
fn replicas_follow_the_policy() {
    REPLICAS.into_iter().for_each(follows);
}

#[test]
fn pipelines_follow_the_policy() {
    PIPELINES.into_iter().for_each(follows);
}

#[test]
fn sums_over_other_axes_follow_the_policy() {
    SHARED.into_iter().for_each(follows);
}

#[test]
fn experts_follow_the_policy() {
    EXPERTS.into_iter().for_each(follows);
}

fn follows(words: &str) {
    let plan = plan(words);
    for (rank, (ops, calls)) in
        on_threads(plan.ranks, |world| recorded(&plan, world)).into_iter().enumerate()
    {
        let (planned_ops, planned_calls) = planned(&plan, rank);
        let text = |ops: &[StateOp]| ops.iter().map(|op| format!("{op}\n")).collect::<String>();
        assert_eq!(text(&ops), text(&planned_ops), "{words}, rank {rank}");
        assert_eq!(ops, planned_ops, "{words}, rank {rank}");
        assert_eq!(calls, planned_calls, "{words}, rank {rank}");
    }
}

/// Operations that a rank starts in one step, and the collectives in the flight recorder.
fn recorded(plan: &Plan, world: World) -> (Vec<StateOp>, Calls) {
    let mut rank = Rank::new(plan, &world, Device::from_env(1)).unwrap();
    let log = rank.store.record();
    // By group, the calls that formed it.
    let mut before = BTreeMap::new();
    for entry in world.flight_record() {
        before.insert(entry.group.clone(), entry.sequence);
    }
    rank.step(&source(), 1).unwrap();
    drop(rank);
    let mut calls = Calls::new();
    for entry in world.flight_record() {
        let is_new = before.get(&entry.group).is_none_or(|last| entry.sequence > *last);
        if let Some(kind) = GROUPS.into_iter().find(|kind| is_new && *entry.group == *kind.name()) {
            calls.entry(kind).or_default().push((entry.kind, entry.bytes));
        }
    }
    let ops = log.lock().unwrap().clone();
    (ops, calls)
}

fn planned(plan: &Plan, rank: usize) -> (Vec<StateOp>, Calls) {
    let part = plan.part(rank);
    let reductions = RankReductions::of(plan, &part);
    let ops: Vec<StateOp> =
        reductions.calls(plan, &part, false).into_iter().map(|call| call.op).collect();
    let mut calls = Calls::new();
    for op in &ops {
        let element = match op {
            StateOp::Gather { .. } => plan.precision.compute,
            _ => plan.precision.gradients,
        };
        for one in reductions.collectives(&part, plan.layout.sequence, *op) {
            let members = plan.mesh().members(one.group, rank).len();
            if members > 1 && GROUPS.contains(&one.group) {
                let call = (one.collective.name(), (one.len * element.bytes()) as u64);
                calls.entry(one.group).or_default().push(call);
            }
        }
    }
    (ops, calls)
}
