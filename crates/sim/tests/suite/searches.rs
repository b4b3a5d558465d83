//! The search compared with an estimate of every layout, and its explanations.

use lockstep_plan::schedule::ScheduleKind;
use lockstep_plan::{Config, Environment, Plan};
use lockstep_sim::advice::{batch_remarks, ladder};
use lockstep_sim::search::{
    Knob, Limits, Objective, Proposal, Search, SearchRequest, bottlenecks, layout_words, reasons,
};
use lockstep_sim::{Cluster, Options, estimate};

fn config(model: &str, batch: usize) -> Config {
    let text = format!(
        "[model]\n{model}\n[train]\nglobal_batch = {batch}\n[precision]\ncompute = \"bf16\"\n"
    );
    Config::parse(&text, &[])
}

const SMALL: &str = "family = \"llama\"\ndim = 512\nlayers = 6\nheads = 8\nkv_heads = 4\nffn = 1536\nseq = 256\nvocab = 1000";
const EXPERTS: &str = "family = \"moe\"\ndim = 256\nlayers = 4\nheads = 4\nseq = 128\nvocab = 1000\nexperts = 4\ntop_k = 2";

const LATENT: &str = "family = \"moe\"\ndim = 256\nlayers = 4\nheads = 4\nseq = 128\nvocab = 1000\nffn = 128\nexperts = 2\ntop_k = 1\nshared_experts = 1\ndense_layers = 1\ndense_ffn = 512\nkv_lora_rank = 64\nq_lora_rank = 96\nnope_head_dim = 64\nrope_head_dim = 32\nv_head_dim = 64";

/// Two hosts of four ranks, with fast links inside and a slow link between them.
fn cluster(memory_gib: f64) -> Cluster {
    let text = "name = \"two\"\naccelerator = \"a100-40\"\nper_host = 4\nranks = 8\n\
        [[links]]\nname = \"inside\"\nspan = 4\nstart_us = 5.0\nhop_us = 1.0\nbandwidth_gbs = 200.0\n\
        [[links]]\nname = \"between\"\nstart_us = 20.0\nhop_us = 10.0\nbandwidth_gbs = 2.0\n";
    let mut cluster = Cluster::parse(text).unwrap();
    cluster.accelerator.memory_gib = memory_gib;
    cluster.accelerator.reserve_gib = 0.0;
    cluster
}

/// Runs a search over all layouts of a run.
fn searched<T>(
    config: &Config,
    cluster: &Cluster,
    ranks: usize,
    then: impl FnOnce(&Search) -> T,
) -> T {
    let options = Options::default();
    let request =
        SearchRequest { config, vocab: None, cluster, options: &options, ranks: vec![ranks] };
    then(&Search::new(&request).unwrap())
}

/// Every layout that `Plan::resolve` accepts, enumerated without the rules of the search, with its estimate. Options
/// without effect are skipped: schedules of one stage, placements of axes of size 1.
fn everything(config: &Config, cluster: &Cluster, ranks: usize) -> Vec<Proposal> {
    let mut all = Vec::new();
    for tensor in 1..=ranks {
        for context in 1..=ranks {
            for pipe in (1..=ranks).filter(|pipe| ranks.is_multiple_of(tensor * context * pipe)) {
                let degrees = [ranks / tensor / context / pipe, tensor, context, pipe];
                for words in choices(degrees, config.model.experts.unwrap_or(1)) {
                    all.extend(estimates(config, cluster, ranks, degrees, &words));
                }
            }
        }
    }
    all
}

fn choices([data, tensor, context, pipe]: [usize; 4], experts: usize) -> Vec<String> {
    let replicas = data * context;
    let list = |there: bool, words: &[&str]| -> Vec<String> {
        words
            .iter()
            .take(if there { words.len() } else { 1 })
            .map(|word| word.to_string())
            .collect()
    };
    let mut schedules: Vec<String> =
        ScheduleKind::ALL.iter().map(|kind| format!("schedule={kind} chunks=1")).collect();
    schedules.rotate_left(1);
    schedules.extend((2..=8).map(|chunks| format!("schedule=interleaved chunks={chunks}")));
    let mut zeros = vec!["zero=0".to_string()];
    for shard in 2..=replicas {
        zeros.extend((1..=3).map(|zero| format!("zero={zero} shard={shard}")));
        zeros.push(format!("zero=3 keep_gathered=true shard={shard}"));
    }
    let questions = [
        vec![format!("data={data} tensor={tensor} context={context} pipe={pipe}")],
        (1..=experts).map(|expert| format!("expert={expert}")).collect(),
        list(context > 1, &["context_kind=ring", "context_kind=ulysses", "context_kind=both"]),
        list(tensor > 1, &["sequence=false", "sequence=true"]),
        list(true, &["recompute=none", "recompute=selective", "recompute=full"]),
        if pipe == 1 { vec![String::new()] } else { schedules },
        zeros,
    ];
    questions.iter().fold(vec![String::new()], |all, answers| {
        all.iter()
            .flat_map(|words| answers.iter().map(move |more| format!("{words} {more}")))
            .collect()
    })
}

/// A layout with each micro-batch and each placement.
fn estimates(
    config: &Config,
    cluster: &Cluster,
    ranks: usize,
    degrees: [usize; 4],
    words: &str,
) -> Vec<Proposal> {
    let env = cluster.environment(ranks, None);
    let typed = config.with_layout(words);
    let mut all = Vec::new();
    for micro in 1..=config.train.global_batch.unwrap() {
        for order in orders(degrees) {
            let mut typed = typed.clone();
            typed.train.micro_batch = Some(micro);
            typed.layout.placement = Some(order);
            let Ok(plan) = Plan::resolve(&typed, &env) else { break };
            let estimate = estimate(&plan, cluster, &Options::default());
            all.push(Proposal { plan, estimate });
        }
    }
    all
}

/// All orders that differ in axes of more than one rank.
fn orders([data, tensor, context, pipe]: [usize; 4]) -> Vec<String> {
    let axes = [("data", data), ("tensor", tensor), ("context", context), ("pipe", pipe)];
    let short: Vec<&str> =
        axes.iter().filter(|(_, size)| *size == 1).map(|(name, _)| *name).collect();
    let long = axes.iter().filter(|(_, size)| *size > 1).map(|(name, _)| *name);
    let mut all: Vec<Vec<&str>> = vec![short];
    for axis in long {
        let from = 4 - axes.iter().filter(|(_, size)| *size > 1).count();
        let inserted = |order: &Vec<&'static str>| {
            (from..=order.len())
                .map(|at| [&order[..at], &[axis], &order[at..]].concat())
                .collect::<Vec<_>>()
        };
        all = all.iter().flat_map(inserted).collect();
    }
    all.into_iter().map(|order| order.join(",")).collect()
}

/// The distinct objective values of some layouts, best first.
fn values<'a>(all: impl Iterator<Item = &'a Proposal>, by: Objective) -> Vec<f64> {
    let mut values: Vec<f64> = all.map(|proposal| proposal.value(by)).collect();
    values.sort_by(f64::total_cmp);
    values.dedup_by(|a, b| (*a / *b - 1.0).abs() < 1e-9);
    values
}

/// For every objective and with little or much memory, the search finds the same as an estimate of every layout.
#[test]
fn search_finds_the_optimum() {
    for (model, batch, ranks) in [(SMALL, 4, 4), (EXPERTS, 2, 4), (LATENT, 2, 4), (SMALL, 6, 2)] {
        let config = config(model, batch);
        let all = everything(&config, &cluster(40.0), ranks);
        let mut needs: Vec<f64> = all.iter().map(Proposal::bytes).collect();
        needs.sort_by(f64::total_cmp);
        // Memory for which a few layouts fit, half of them, all.
        for memory in [needs[needs.len() / 50], needs[needs.len() / 2], needs[needs.len() - 1]] {
            let cluster = cluster(memory / (1u64 << 30) as f64);
            let room = cluster.accelerator.memory();
            for by in [Objective::Time, Objective::Memory, Objective::Cost] {
                let found = searched(&config, &cluster, ranks, |search| {
                    search.best(by, 12, &Limits::default())
                });
                assert!(found.is_sorted_by(|a, b| a.value(by) <= b.value(by)));
                let fitting = all.iter().filter(|proposal| proposal.bytes() <= room);
                let (best, want) = (values(found.iter(), by), values(fitting, by));
                let same = |(a, b): (&f64, &f64)| (a / b - 1.0).abs() < 1e-9;
                assert!(
                    best.is_empty() == want.is_empty() && best.iter().zip(&want).all(same),
                    "{ranks} ranks, {memory} bytes, {by:?}: {best:?} and not {:?}",
                    &want[..best.len()]
                );
            }
        }
    }
}

/// Where pipelines have no bubbles, the bounds hold as well.
#[test]
fn search_finds_the_optimum_of_ranks_that_share_an_accelerator() {
    let config = config(SMALL, 4);
    for processes in [false, true] {
        let cluster = cluster(40.0).shared_by(4, processes);
        let all = everything(&config, &cluster, 4);
        let found = searched(&config, &cluster, 4, |search| {
            search.best(Objective::Time, 12, &Limits::default())
        });
        let best = values(found.iter(), Objective::Time);
        let want = values(all.iter(), Objective::Time);
        let same = |(a, b): (&f64, &f64)| (a / b - 1.0).abs() < 1e-9;
        assert!(!best.is_empty() && best.iter().zip(&want).all(same), "{best:?}, not {want:?}");
    }
}

#[test]
fn search_is_deterministic() {
    let (cluster, config) = (cluster(0.6), config(SMALL, 8));
    let find = || {
        searched(&config, &cluster, 8, |search| {
            search.best(Objective::Time, 10, &Limits::default())
        })
    };
    let found = find();
    assert_eq!(found.len(), 10);
    assert!(found.iter().all(|proposal| proposal.estimate.fits && proposal.over() <= 0.0));
    assert_eq!(found, find());
}

/// The cache does not change results.
#[test]
fn cached_estimates_do_not_change_results() {
    let (cluster, config) = (cluster(0.3), config(SMALL, 8));
    let limits = Limits::default();
    let fresh = searched(&config, &cluster, 8, |search| search.best(Objective::Memory, 5, &limits));
    searched(&config, &cluster, 8, |search| {
        let best = search.best(Objective::Time, 5, &limits).remove(0);
        let (why, stats) = (reasons(search, &best, Objective::Time), search.stats());
        assert_eq!(why, reasons(search, &best, Objective::Time));
        assert_eq!(search.stats().estimated, stats.estimated, "everything was cached");
        assert_eq!(search.best(Objective::Memory, 5, &limits), fresh);
    });
}

#[test]
fn limits_are_respected() {
    let (cluster, config) = (cluster(40.0), config(SMALL, 8));
    let limits =
        Limits::default().with(Knob::Tensor, 2..=4).with(Knob::Zero, 1..=1).with(Knob::Pipe, 2..=8);
    let found = searched(&config, &cluster, 8, |search| search.best(Objective::Time, 20, &limits));
    for proposal in &found {
        let layout = &proposal.plan.layout;
        assert!(
            (2..=4).contains(&layout.tensor) && layout.zero == 1 && layout.pipe >= 2,
            "{}",
            layout_words(&proposal.plan)
        );
    }
    // The text of a layout parses back to the same layout.
    let best = &found[0];
    let typed = config.with_layout(&layout_words(&best.plan).replace('"', ""));
    assert_eq!(typed.layout.tensor.unwrap_or(1), best.plan.layout.tensor);
}

/// With much memory and a slow network, tensor stays inside a host, and the reason names the slow link.
#[test]
fn reasons_name_the_slow_link() {
    let (cluster, config) = (cluster(40.0), config(SMALL, 8));
    let inside = Limits::default().with(Knob::Tensor, 4..=4).with(Knob::Zero, 0..=0);
    let (best, why) = searched(&config, &cluster, 8, |search| {
        let best = search.best(Objective::Time, 1, &inside).remove(0);
        let why = reasons(search, &best, Objective::Time);
        (best, why)
    });
    let tensor = why.iter().find(|reason| reason.knob == Knob::Tensor).unwrap();
    let wider = tensor
        .alternatives
        .iter()
        .find(|other| other.setting == "tensor=8")
        .unwrap_or_else(|| panic!("{tensor:?}"));
    assert!(
        wider.ratio.unwrap() > 1.05 && wider.why.contains("tensor communication over between"),
        "{wider:?}"
    );
    assert!(!bottlenecks(&best, &cluster).is_empty());
}

/// With little memory, the reasons name the settings that are needed to fit.
#[test]
fn reasons_name_what_does_not_fit() {
    let (cluster, config) = (cluster(0.08), config(SMALL, 8));
    searched(&config, &cluster, 8, |search| {
        let best = search.best(Objective::Time, 1, &Limits::default()).remove(0);
        let text: String =
            reasons(search, &best, Objective::Time).iter().map(|reason| reason.line()).collect();
        assert!(text.contains("exceeds the memory"), "{text}");
        let smallest = search.smallest(&Limits::default()).unwrap();
        let least = search.best(Objective::Memory, 1, &Limits::default()).remove(0);
        assert!((smallest.bytes() / least.bytes() - 1.0).abs() < 1e-9);
    });
}

#[test]
fn advice_takes_only_needed_techniques() {
    let config = config(SMALL, 8);
    let climb = |memory_gib: f64| {
        let cluster = cluster(memory_gib);
        searched(&config, &cluster, 8, |search| ladder(search, &cluster))
    };
    let roomy = climb(40.0);
    assert!(roomy[0].technique == "data parallel" && roomy[0].taken, "{:?}", roomy[0].why);
    assert!(roomy.iter().all(|step| step.technique != "expert parallel"));
    // Plain data parallelism does not fit, a later technique does.
    let tight = climb(0.25);
    assert!(!tight[0].taken && tight[0].why.contains("exceeds the memory"), "{}", tight[0].why);
    assert!(tight.iter().any(|step| step.taken && step.why.starts_with("fits now")));
    for step in roomy.iter().chain(&tight).filter(|step| step.taken) {
        assert!(step.proposal.as_ref().unwrap().estimate.fits);
    }
}

#[test]
fn larger_batches_change_the_learning_rate() {
    let env = Environment::one_host(1, 1);
    let plan = Plan::resolve(&config(SMALL, 8), &env).unwrap();
    assert_eq!(batch_remarks(&plan, 8), None);
    let remarks = batch_remarks(&plan, 32).unwrap();
    assert!((remarks.lr / plan.train.lr.peak - 2.0).abs() < 1e-12);
    assert!(remarks.warmup >= 100.min(plan.train.lr.warmup));
}
