//! The search against an estimate of everything, and what its words say.

use lockstep_plan::schedule::ScheduleKind;
use lockstep_plan::{Config, Environment, Plan};
use lockstep_sim::advice::{batch_remarks, ladder};
use lockstep_sim::search::{
    Knob, Limits, Objective, Proposal, Search, SearchRequest, layout_words, limit, reasons,
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

/// Two hosts of four: a fast link inside, a slow one between.
fn cluster(memory_gib: f64) -> Cluster {
    let text = "name = \"two\"\naccelerator = \"a100-40\"\nper_host = 4\nranks = 8\n\
        [[links]]\nname = \"inside\"\nspan = 4\nstart_us = 5.0\nhop_us = 1.0\nbandwidth_gbs = 200.0\n\
        [[links]]\nname = \"between\"\nstart_us = 20.0\nhop_us = 10.0\nbandwidth_gbs = 2.0\n";
    let mut cluster = Cluster::parse(text).unwrap();
    cluster.accelerator.memory_gib = memory_gib;
    cluster.accelerator.reserve_gib = 0.0;
    cluster
}

/// A search among all layouts of a run on so many ranks.
fn searched<T>(
    config: &Config,
    cluster: &Cluster,
    ranks: usize,
    then: impl FnOnce(&Search) -> T,
) -> T {
    let options = Options::default();
    let wanted =
        SearchRequest { config, vocab: None, cluster, options: &options, ranks: vec![ranks] };
    then(&Search::new(&wanted).unwrap())
}

/// Every layout that `Plan::resolve` takes, written out without the search's rules, with its estimate. Only what says
/// nothing is not said: schedules of one stage, placements of axes of one.
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

/// A layout with every micro-batch and every placement.
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

/// All orders in which the axes of more than one rank differ.
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

/// The values of some layouts, each once, the best first.
fn values<'a>(all: impl Iterator<Item = &'a Proposal>, by: Objective) -> Vec<f64> {
    let mut values: Vec<f64> = all.map(|proposal| proposal.value(by)).collect();
    values.sort_by(f64::total_cmp);
    values.dedup_by(|a, b| (*a / *b - 1.0).abs() < 1e-9);
    values
}

/// Nothing among the best is missed, by any measure, with little memory and with much: the search finds what an
/// estimate of everything does.
#[test]
fn nothing_better_is_missed() {
    for (model, batch, ranks) in [(SMALL, 4, 4), (EXPERTS, 2, 4), (LATENT, 2, 4), (SMALL, 6, 2)] {
        let config = config(model, batch);
        let all = everything(&config, &cluster(40.0), ranks);
        let mut needs: Vec<f64> = all.iter().map(Proposal::bytes).collect();
        needs.sort_by(f64::total_cmp);
        // So much that a few fit, half of them, all.
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

#[test]
fn the_same_search_finds_the_same() {
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

/// What is known from one question changes no answer to the next.
#[test]
fn what_was_found_before_changes_nothing() {
    let (cluster, config) = (cluster(0.3), config(SMALL, 8));
    let limits = Limits::default();
    let fresh = searched(&config, &cluster, 8, |search| search.best(Objective::Memory, 5, &limits));
    searched(&config, &cluster, 8, |search| {
        let best = search.best(Objective::Time, 5, &limits).remove(0);
        let (why, looked) = (reasons(search, &best, Objective::Time), search.looked());
        assert_eq!(why, reasons(search, &best, Objective::Time));
        assert_eq!(search.looked().estimated, looked.estimated, "it was all known");
        assert_eq!(search.best(Objective::Memory, 5, &limits), fresh);
    });
}

#[test]
fn limits_are_kept() {
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
    // What is in words is what is typed.
    let best = &found[0];
    let typed = config.with_layout(&layout_words(&best.plan).replace('"', ""));
    assert_eq!(typed.layout.tensor.unwrap_or(1), best.plan.layout.tensor);
}

/// Much memory and a slow network: tensor stays inside a host, and leaving it is told with the link.
#[test]
fn what_crosses_the_slow_link_is_told() {
    let (cluster, config) = (cluster(40.0), config(SMALL, 8));
    let inside = Limits::default().with(Knob::Tensor, 4..=4).with(Knob::Zero, 0..=0);
    let (best, why) = searched(&config, &cluster, 8, |search| {
        let best = search.best(Objective::Time, 1, &inside).remove(0);
        let why = reasons(search, &best, Objective::Time);
        (best, why)
    });
    let tensor = why.iter().find(|reason| reason.knob == Knob::Tensor).unwrap();
    let wider = tensor
        .turns
        .iter()
        .find(|turn| turn.typed == "tensor=8")
        .unwrap_or_else(|| panic!("{tensor:?}"));
    assert!(
        wider.times.unwrap() > 1.05 && wider.why.contains("tensor exchanges over between"),
        "{wider:?}"
    );
    assert!(!limit(&best, &cluster).is_empty());
}

/// Little memory: what keeps it inside says so.
#[test]
fn what_would_not_fit_is_told() {
    let (cluster, config) = (cluster(0.25), config(SMALL, 8));
    searched(&config, &cluster, 8, |search| {
        let best = search.best(Objective::Time, 1, &Limits::default()).remove(0);
        let told: String =
            reasons(search, &best, Objective::Time).iter().map(|reason| reason.line()).collect();
        assert!(told.contains("over"), "{told}");
        let smallest = search.smallest(&Limits::default()).unwrap();
        let least = search.best(Objective::Memory, 1, &Limits::default()).remove(0);
        assert!((smallest.bytes() / least.bytes() - 1.0).abs() < 1e-9);
    });
}

#[test]
fn the_ladder_goes_no_higher_than_needed() {
    let config = config(SMALL, 8);
    let climb = |memory_gib: f64| {
        let cluster = cluster(memory_gib);
        searched(&config, &cluster, 8, |search| ladder(search, &cluster))
    };
    let roomy = climb(40.0);
    assert!(roomy[0].means == "data parallel" && roomy[0].taken, "{:?}", roomy[0].why);
    assert!(roomy.iter().all(|rung| rung.means != "expert parallel"));
    // What plain data parallel needs is too much: the first rung fails, a later one fits.
    let tight = climb(0.25);
    assert!(!tight[0].taken && tight[0].why.contains("over"), "{}", tight[0].why);
    assert!(tight.iter().any(|rung| rung.taken && rung.why.starts_with("now it fits")));
    for rung in roomy.iter().chain(&tight).filter(|rung| rung.taken) {
        assert!(rung.proposal.as_ref().unwrap().estimate.fits);
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
