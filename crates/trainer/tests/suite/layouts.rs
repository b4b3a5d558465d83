//! The result does not depend on the layout: losses and weights of each axis, combination and option are compared with
//! those of one rank.

use lockstep_comm::on_threads;
use lockstep_kernels::Device;
use lockstep_plan::{Config, Plan};
use lockstep_trainer::{Rank, Tolerance, Trajectory, Trial, train};

use crate::plans::{environment, source};

/// Number of steps. Fewer with experts: in time, a token whose two best experts are equally probable up to rounding
/// takes another one, and the runs part.
fn steps(model: &str) -> u64 {
    if model == MOE { 8 } else { 20 }
}

/// Four layers whose dimensions are divisible by 2, 3 and 4.
const GPT2: &str = "family = \"gpt2\"\nkv_heads = 12";
const LLAMA: &str = "family = \"llama\"\nkv_heads = 2";
const MOE: &str =
    "family = \"moe\"\nkv_heads = 2\nexperts = 12\ntop_k = 2\naux_loss = 0.02\nz_loss = 0.01";

/// A plan of a model. `words` are keys of `[layout]`, and dotted keys of other sections.
fn plan(model: &str, words: &str) -> Plan {
    let text = format!(
        "name = \"test\"\n[model]\n{model}\ndim = 48\nlayers = 4\nheads = 12\nffn = 48\nseq = 24\n\
         [train]\nsteps = 20\nglobal_batch = 12\nmicro_batch = 1\nlr = 3e-3\nwarmup = 2\nthreads = 1"
    );
    let (sets, layout): (Vec<&str>, Vec<&str>) =
        words.split_whitespace().partition(|word| word.contains('.'));
    let sets: Vec<String> = sets.into_iter().map(String::from).collect();
    let config = Config::parse(&text, &sets).with_layout(&layout.join(" "));
    let environment = environment(config.ranks()).with_vocab(source().vocab());
    Plan::resolve(&config, &environment).unwrap_or_else(|errors| {
        let errors: String = errors.iter().map(|error| format!("{error}\n")).collect();
        panic!("{words}: {errors}")
    })
}

fn trajectory(model: &str, words: &str) -> Trajectory {
    let (plan, source) = (plan(model, words), source());
    let device = || Device::from_env(plan.train.threads);
    let trial = Trial { plan: &plan, source: &source, steps: steps(model), device: &device };
    let ranks = on_threads(plan.ranks, |world| train(trial, &world, &mut |_| {}));
    let results = ranks.into_iter().map(|r| r.unwrap_or_else(|error| panic!("{words}: {error}")));
    results.collect::<Vec<_>>().remove(0).expect("rank 0 returns the trajectory")
}

/// Compares each layout with one rank, both with the settings `also`, and reports all that differ.
#[track_caller]
fn match_one_rank(model: &str, also: &str, layouts: &[impl AsRef<str>], tolerance: Tolerance) {
    let one = trajectory(model, also);
    assert!(one.losses.last() < one.losses.first(), "no progress: {:?}", one.losses);
    let mut differ = Vec::new();
    for words in layouts {
        let words = format!("{} {also}", words.as_ref());
        let difference = one.difference(&trajectory(model, &words), &tolerance);
        if !difference.within(&tolerance) {
            differ.push(format!("{words}: {difference:?}"));
        }
    }
    assert!(differ.is_empty(), "{} of {}:\n{}", differ.len(), layouts.len(), differ.join("\n"));
}

/// Every axis, schedule, ZeRO level and option at least once.
#[test]
fn gpt2_layouts_match_one_rank() {
    let layouts = [
        "data=3",
        "tensor=3 sequence=true",
        "context=3",
        "context=4 context_kind=both",
        "pipe=3 schedule=zb-h2",
        "data=4 zero=3 shard=2",
        "data=2 zero=1 pipe=2 schedule=gpipe recompute=selective",
        "data=2 zero=3 keep_gathered=true tensor=2 sequence=true pipe=2 schedule=zb-h1",
    ];
    match_one_rank(GPT2, "", &layouts, Tolerance::F32);
}

#[test]
fn llama_layouts_match_one_rank() {
    let layouts = [
        "data=2 zero=2 recompute=full train.micro_batch=3",
        "tensor=4",
        "context=2 context_kind=ulysses zero=3",
        "pipe=4",
        "pipe=2 schedule=interleaved recompute=full",
        "tensor=2 context=2 context_kind=ulysses pipe=2",
        "data=2 zero=3 tensor=2 sequence=true context=2 pipe=2 schedule=zb-h1",
    ];
    match_one_rank(LLAMA, "", &layouts, Tolerance::F32);
}

#[test]
fn expert_layouts_match_one_rank() {
    let layouts = [
        "data=2 expert=2",
        "data=4 expert=2 zero=3 shard=4",
        "context=2 expert=2",
        "data=2 expert=2 tensor=2 sequence=true",
        "data=2 expert=2 zero=2 pipe=2 schedule=zb-h1 recompute=full",
    ];
    match_one_rank(MOE, "", &layouts, Tolerance::F32);
}

/// The layouts have different numbers of micro-batches, whose sizes differ too.
#[test]
fn balance_over_the_batch_trains_the_same_model_on_every_layout() {
    let layouts = [
        "data=2",
        "data=2 train.micro_batch=6",
        "data=3 expert=3 train.micro_batch=2 zero=2",
        "context=2 expert=2 recompute=full",
        "pipe=2 schedule=interleaved train.micro_batch=3",
        "data=2 tensor=2 sequence=true pipe=2 schedule=zb-h1 zero=1",
    ];
    match_one_rank(MOE, "model.balance=batch model.aux_loss=0.3", &layouts, Tolerance::F32);
}

/// Loads, imbalance and dropped slots of the first step are sums over all ranks and micro-batches.
#[test]
fn expert_loads_are_those_of_the_global_batch() {
    let also = "model.capacity=0.8";
    let load = |words: &str| {
        let (plan, source) = (plan(MOE, &format!("{words} {also}")), source());
        let ranks = on_threads(plan.ranks, |world| {
            let mut rank = Rank::new(&plan, &world, Device::from_env(1)).unwrap();
            rank.step(&source, 1).unwrap()
        });
        assert!(ranks.iter().all(|step| step.experts == ranks[0].experts), "{words}");
        ranks[0].experts.unwrap()
    };
    let one = load("train.micro_batch=12");
    assert!(one.dropped_fraction.unwrap() > 0.0 && one.min < 1.0 && one.max > 1.0, "{one:?}");
    for words in ["data=2 expert=2", "tensor=2 sequence=true", "data=2 pipe=2 train.micro_batch=3"]
    {
        let many = load(words);
        assert_eq!((many.min, many.max), (one.min, one.max), "{words}");
        assert!((many.imbalance - one.imbalance).abs() < 1e-12, "{words}: {many:?}");
        assert_eq!(many.dropped_fraction, one.dropped_fraction, "{words}");
    }
}

/// Combinations of all axes of GPT-2 and Llama.
fn dense(model: &str) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let mut add = |words: &str| all.push(words.into());
    // Each axis by itself. Two key heads cannot be split over three ranks.
    let head_degrees = if model == GPT2 { &[2, 3, 4][..] } else { &[2, 4] };
    for degree in [2, 3, 4] {
        add(&format!("data={degree}"));
        add(&format!("context={degree}"));
        for schedule in ["1f1b", "gpipe", "zb-h1", "zb-h2"] {
            add(&format!("pipe={degree} schedule={schedule}"));
        }
    }
    for degree in head_degrees {
        add(&format!("tensor={degree}"));
        add(&format!("tensor={degree} sequence=true"));
        add(&format!("context={degree} context_kind=ulysses"));
    }
    add("context=4 context_kind=both");
    add("pipe=2 schedule=interleaved");
    // ZeRO levels with each other axis.
    for zero in 1..=3 {
        for axis in ["", "tensor=2 sequence=true", "context=2", "pipe=2", "pipe=2 schedule=zb-h1"] {
            add(&format!("data=2 zero={zero} {axis}"));
        }
        add(&format!("context=3 zero={zero}"));
        add(&format!("data=4 zero={zero} shard=2"));
        add(&format!("data=2 context=2 zero={zero} shard=2 pipe=2"));
    }
    add("data=3 zero=3 keep_gathered=true recompute=full");
    // Micro-batch sizes and recomputation.
    for words in [
        "train.micro_batch=6",
        "recompute=selective",
        "recompute=full",
        "data=2 train.micro_batch=2",
    ] {
        add(words);
    }
    for axis in
        ["tensor=2", "context=2 context_kind=ulysses", "pipe=2 schedule=zb-h2", "data=2 zero=3"]
    {
        add(&format!("{axis} recompute=full train.micro_batch=2"));
    }
    // Pairs without ZeRO.
    for words in [
        "data=2 tensor=2",
        "data=3 tensor=2 sequence=true",
        "data=2 context=3",
        "data=3 pipe=2 schedule=interleaved",
        "tensor=2 context=2",
        "tensor=2 sequence=true context=3",
        "tensor=2 sequence=true pipe=2 schedule=gpipe",
        "tensor=4 sequence=true pipe=2 schedule=interleaved",
        "context=2 pipe=2",
        "context=4 context_kind=both pipe=2 schedule=zb-h2",
    ] {
        add(words);
    }
    // Triples.
    for words in [
        "data=2 tensor=2 pipe=2",
        "data=2 zero=1 tensor=2 sequence=true pipe=2 schedule=interleaved",
        "data=2 zero=2 tensor=2 pipe=2 schedule=zb-h2 recompute=selective",
        "data=2 zero=3 tensor=2 sequence=true pipe=3 schedule=zb-h1",
        "data=2 tensor=2 context=2",
        "data=2 zero=3 tensor=2 sequence=true context=2 context_kind=ulysses",
        "data=2 context=2 pipe=2 schedule=gpipe",
        "data=2 zero=3 shard=2 context=2 pipe=2 schedule=zb-h1",
        "tensor=2 context=2 pipe=2",
        "tensor=2 sequence=true context=2 context_kind=ulysses zero=2 pipe=2 schedule=interleaved recompute=full",
        "tensor=2 sequence=true context=3 zero=3 pipe=2 schedule=zb-h1",
    ] {
        add(words);
    }
    // All four axes.
    for words in [
        "data=2 tensor=2 context=2 pipe=2",
        "data=2 zero=3 tensor=2 sequence=true context=2 pipe=2 schedule=zb-h1",
        "data=2 zero=2 shard=2 tensor=2 sequence=true context=2 context_kind=ulysses pipe=2 schedule=interleaved recompute=full",
    ] {
        add(words);
    }
    all
}

/// Expert parallelism with every other axis.
fn experts() -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let mut add = |words: &str| all.push(words.into());
    for words in [
        "data=2",
        "tensor=2",
        "tensor=4 sequence=true",
        "context=2",
        "context=3",
        "pipe=2",
        "pipe=4 schedule=zb-h1",
    ] {
        add(words);
    }
    for degree in [2, 3, 4] {
        add(&format!("data={degree} expert={degree}"));
        add(&format!("context={degree} expert={degree}"));
    }
    add("data=4 expert=2");
    add("data=2 context=2 expert=4");
    for zero in 1..=3 {
        for axis in ["", "tensor=2 sequence=true", "context=2", "pipe=2", "pipe=2 schedule=zb-h1"] {
            add(&format!("data=2 expert=2 zero={zero} {axis}"));
        }
        add(&format!("data=4 expert=2 zero={zero}"));
        add(&format!("data=4 expert=2 zero={zero} shard=2"));
    }
    for words in [
        "data=2 expert=2 recompute=full",
        "data=2 expert=2 recompute=selective train.micro_batch=3",
        "data=2 expert=2 tensor=2",
        "data=3 expert=3 pipe=2 schedule=interleaved",
        "data=2 expert=2 tensor=2 sequence=true pipe=2 schedule=gpipe",
        "data=2 expert=2 zero=3 tensor=2 pipe=2 schedule=zb-h2",
        "context=2 expert=2 tensor=2 sequence=true pipe=2",
        "data=2 context=2 expert=2 zero=3 tensor=2 sequence=true",
        "data=2 context=2 expert=4 zero=2 pipe=2 schedule=zb-h1",
        "data=2 context=2 expert=2 tensor=2 pipe=2",
        "data=2 context=2 expert=4 zero=3 tensor=2 sequence=true pipe=2 schedule=zb-h1 recompute=full",
        "data=2 context=2 expert=2 zero=1 shard=2 tensor=2 sequence=true pipe=2 schedule=interleaved",
    ] {
        add(words);
    }
    all
}

#[test]
#[ignore = "minutes; see CONTRIBUTING.md"]
fn all_gpt2_layouts_match_one_rank() {
    match_one_rank(GPT2, "", &dense(GPT2), Tolerance::F32);
}

#[test]
#[ignore = "minutes; see CONTRIBUTING.md"]
fn all_llama_layouts_match_one_rank() {
    match_one_rank(LLAMA, "", &dense(LLAMA), Tolerance::F32);
}

#[test]
#[ignore = "minutes; see CONTRIBUTING.md"]
fn all_expert_layouts_match_one_rank() {
    match_one_rank(MOE, "", &experts(), Tolerance::F32);
}

#[test]
fn a_layout_is_bitwise_reproducible() {
    for (model, words) in [
        (GPT2, "data=2 zero=2 tensor=2 sequence=true"),
        (LLAMA, "context=2 pipe=2 schedule=zb-h1"),
        (MOE, "data=2 expert=2 zero=3"),
    ] {
        let (first, again) = (trajectory(model, words), trajectory(model, words));
        assert_eq!(first.losses, again.losses, "{words}");
        assert_eq!(first.grad_norms, again.grad_norms, "{words}");
        for tensor in first.params.names() {
            let name = &tensor.name;
            assert!(first.params.get(name) == again.params.get(name), "{words}: {name}");
        }
    }
}

#[test]
fn layouts_match_one_rank_in_bf16() {
    let layouts = ["data=2 zero=3", "tensor=2 sequence=true", "context=2", "pipe=2 schedule=zb-h1"];
    match_one_rank(GPT2, "precision.compute=bf16", &layouts, Tolerance::BF16);
    match_one_rank(MOE, "precision.compute=bf16", &["data=2 expert=2 zero=1"], Tolerance::BF16);
}

/// bf16 gradients are rounded after each micro-batch and after each reduction, in different places on each layout.
#[test]
fn layouts_match_one_rank_with_bf16_gradients() {
    let layouts = [
        "data=2",
        "data=4 zero=1",
        "data=4 zero=2 shard=2",
        "data=4 zero=3",
        "tensor=2 sequence=true",
        "data=2 zero=2 pipe=2 schedule=zb-h1",
    ];
    match_one_rank(GPT2, "precision.gradients=bf16", &layouts, Tolerance::BF16);
    let also = "precision.compute=bf16 precision.gradients=bf16";
    match_one_rank(LLAMA, also, &["data=4 zero=3", "tensor=2 pipe=2"], Tolerance::BF16);
    match_one_rank(MOE, also, &["data=2 expert=2 zero=1"], Tolerance::BF16);
}

/// Dropout masks depend on the global position of an element, not on the rank.
#[test]
fn dropout_does_not_depend_on_the_layout() {
    let layouts = [
        "data=3",
        "data=2 zero=3 recompute=full",
        "tensor=2",
        "tensor=2 sequence=true",
        "context=2",
        "context=2 context_kind=ulysses",
        "pipe=2 schedule=zb-h1 train.micro_batch=2",
    ];
    match_one_rank(GPT2, "model.dropout=0.1", &layouts, Tolerance::F32);
}
