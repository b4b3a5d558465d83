//! Planned traffic compared with the formulas of the papers. The trainer's tests compare it with the bytes sent.

use lockstep_plan::{
    Collective, Config, Environment, GroupKind, Phase, Plan, traffic, traffic_of_step,
};

const LAYERS: usize = 8;

fn plan(ranks: usize, sets: &[&str]) -> Plan {
    let text = "[model]\nfamily = \"llama\"\nvocab = 512\ndim = 64\nlayers = 8\nheads = 8\nseq = 64\n\
                [train]\nglobal_batch = 32\nmicro_batch = 8";
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    let around = Environment::one_host(ranks, 1);
    Plan::resolve(&Config::parse(text, &sets), &around).unwrap_or_else(|wrong| panic!("{wrong:#?}"))
}

/// Elements of all collectives of a kind.
fn elements(plan: &Plan, kind: GroupKind, collective: Collective) -> usize {
    let list = traffic(plan, 0).into_iter();
    let wanted = list.filter(|e| (e.kind, e.collective) == (Some(kind), collective));
    wanted.map(|e| e.count * e.times).sum()
}

/// ZeRO (Rajbhandari et al. 2020): levels 1 and 2 send as much as an all-reduce, as reduce-scatter and all-gather; level 3
/// gathers every parameter twice, unless gathered parameters are kept.
#[test]
fn states_are_sent_as_in_the_zero_paper() {
    let sent = |sets: &[&str]| {
        let plan = plan(4, &[sets, &["layout.data=4"]].concat());
        assert_eq!(plan.train.accumulation, 1);
        [
            elements(&plan, GroupKind::Copies, Collective::AllReduce),
            elements(&plan, GroupKind::Shard, Collective::ReduceScatter),
            elements(&plan, GroupKind::Gather, Collective::AllGather),
        ]
    };
    let shape = plan(4, &[]).model;
    let (n, blocks) = (shape.param_count(), shape.blocks());
    let layers: usize = blocks[1..=LAYERS].iter().map(|block| block.len()).sum();
    assert_eq!(sent(&[]), [n, 0, 0]);
    assert_eq!(sent(&["layout.zero=1"]), [0, n, n]);
    assert_eq!(sent(&["layout.zero=2"]), [0, n, n]);
    // Embedding and head are gathered once.
    assert_eq!(sent(&["layout.zero=3"]), [0, n, n + layers]);
    assert_eq!(sent(&["layout.zero=3", "layout.keep_gathered=true"]), [0, n, n]);
    // With hybrid sharding over two ranks, copies all-reduce only their shards.
    let hybrid = sent(&["layout.zero=2", "layout.shard=2"]);
    assert_eq!(hybrid, [n / 2, n, n]);
}

/// Megatron-LM (Shoeybi et al. 2019): two all-reduces forward and two backward for each layer. Sequence
/// parallelism (Korthikanti et al. 2022) has an all-gather and a reduce-scatter for each, and another all-gather for each
/// input that is not saved and for each gradient.
#[test]
fn tensor_parallel_communicates_as_megatron() {
    let count = |plan: &Plan, collective, phase| -> usize {
        let stream = plan.train.micro_batch * plan.data.seq * plan.model.dim;
        let list = traffic(plan, 0).into_iter();
        let of = list.filter(|e| (e.collective, e.phase, e.count) == (collective, phase, stream));
        of.map(|e| e.times).sum::<usize>() / plan.train.accumulation
    };
    let tensor = plan(2, &["layout.tensor=2"]);
    // Embedding and head have one each.
    assert_eq!(count(&tensor, Collective::AllReduce, Phase::Forward), 2 * LAYERS + 1);
    assert_eq!(count(&tensor, Collective::AllReduce, Phase::Backward), 2 * LAYERS + 1);
    let sequence = plan(2, &["layout.tensor=2", "layout.sequence=true"]);
    assert_eq!(count(&sequence, Collective::ReduceScatter, Phase::Forward), 2 * LAYERS + 1);
    assert_eq!(count(&sequence, Collective::AllGather, Phase::Forward), 2 * LAYERS);
    assert_eq!(count(&sequence, Collective::ReduceScatter, Phase::Backward), 2 * LAYERS + 1);
    assert_eq!(count(&sequence, Collective::AllGather, Phase::Backward), 4 * LAYERS + 2);
    // With full recompute, the first half of a layer is all-reduced once more.
    let again = plan(2, &["layout.tensor=2", "layout.recompute=full"]);
    assert_eq!(count(&again, Collective::AllReduce, Phase::Backward), 3 * LAYERS + 1);
}

/// Attention traffic of one layer and micro-batch equals the formulas of context parallelism.
#[test]
fn context_parallel_sends_what_its_formulas_say() {
    use lockstep_plan::context::{AttentionShard, sent};
    for (kind, degrees) in [("ring", (1, 4)), ("ulysses", (4, 1)), ("both", (2, 2))] {
        let plan = plan(4, &["layout.context=4", &format!("layout.context_kind={kind}")]);
        let shape = &plan.model;
        let shard = AttentionShard {
            tokens: plan.train.micro_batch * plan.data.seq / 4,
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            bytes: 4,
        };
        let formula = sent(degrees, &shard);
        let bytes = |phase| {
            let list = traffic(&plan, 0).into_iter();
            let of = list.filter(|e| (e.kind, e.phase) == (Some(GroupKind::Context), phase));
            let bytes = of.map(|e| {
                let all = (e.count * e.width * e.times) as u64;
                let others = |n: usize| all / n as u64 * (n as u64 - 1);
                if e.collective == Collective::AllToAll { others(e.members) } else { all }
            });
            bytes.sum::<u64>() / (LAYERS * plan.train.accumulation) as u64
        };
        assert_eq!(bytes(Phase::Forward), formula.forward, "{kind}");
        assert_eq!(bytes(Phase::Backward), formula.backward, "{kind}");
    }
}

/// Deep Gradient Compression (Lin et al. 2018): the first steps send the whole gradient, later ones its largest elements
/// with their indices.
#[test]
fn top_k_starts_after_the_warm_up() {
    let sets =
        ["layout.data=4", "comm.compression=topk:0.01", "train.steps=200", "comm.bucket_mb=100"];
    let plan = plan(4, &sets);
    let n = plan.model.param_count();
    let sums = |step| -> Vec<_> {
        let list = traffic_of_step(&plan, 0, step).into_iter();
        let sums = list.filter(|e| e.kind == Some(GroupKind::Copies));
        sums.map(|e| (e.collective, e.count * e.width * e.times)).collect()
    };
    for step in [1, 20] {
        assert_eq!(sums(step), [(Collective::AllReduce, 4 * n)]);
    }
    let selected = n.div_ceil(100);
    for step in [21, 200] {
        assert_eq!(sums(step), [(Collective::AllGather, 4 * 8 * selected)]);
    }
}
