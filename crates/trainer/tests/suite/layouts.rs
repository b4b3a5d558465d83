//! Every layout is the same training: each axis, their products and their options are held to the losses and the
//! weights of one rank.

use lockstep_comm::Options;
use lockstep_kernels::Device;
use lockstep_plan::{Config, Environment, Plan};
use lockstep_trainer::{Tolerance, Trajectory, Trial, train_on_threads};

use crate::plans::source;

const STEPS: u64 = 20;

/// Four layers that can be cut in two, three and four every way. Keys are shared where they are grouped.
const GPT2: &str = "family = \"gpt2\"\nkv_heads = 12";
const LLAMA: &str = "family = \"llama\"\nkv_heads = 2";
const MOE: &str =
    "family = \"moe\"\nkv_heads = 2\nexperts = 12\ntop_k = 2\naux_loss = 0.02\nz_loss = 0.01";

/// A run of a model on a layout: words of `[layout]`, and among them dotted keys of other sections.
fn plan(model: &str, words: &str) -> Plan {
    let text = format!(
        "name = \"test\"\n[model]\n{model}\ndim = 48\nlayers = 4\nheads = 12\nffn = 48\nseq = 24\n\
         [train]\nsteps = {STEPS}\nglobal_batch = 12\nmicro_batch = 1\nlr = 3e-3\nwarmup = 2\nthreads = 1"
    );
    let (sets, layout): (Vec<&str>, Vec<&str>) =
        words.split_whitespace().partition(|word| word.contains('.'));
    let sets: Vec<String> = sets.into_iter().map(String::from).collect();
    let config = Config::parse(&text, &sets).with_layout(&layout.join(" "));
    let around = Environment::one_host(config.ranks(), 1).with_vocab(source().vocab());
    Plan::resolve(&config, &around).unwrap_or_else(|mistakes| {
        panic!("{words}: {}", mistakes.iter().map(|m| format!("{m}\n")).collect::<String>())
    })
}

fn trajectory(model: &str, words: &str) -> Trajectory {
    let (plan, source) = (plan(model, words), source());
    let device = || Device::cpu(plan.train.threads);
    let trial = Trial { plan: &plan, source: &source, steps: STEPS, device: &device };
    train_on_threads(trial, &Options::default()).unwrap_or_else(|error| panic!("{words}: {error}"))
}

/// Holds each layout to one rank, both with `also`; says which differ, all at once.
#[track_caller]
fn alike(model: &str, also: &str, layouts: &[impl AsRef<str>], tolerance: Tolerance) {
    let one = trajectory(model, also);
    assert!(one.losses[STEPS as usize - 1] < one.losses[0], "it learns: {:?}", one.losses);
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

/// Every axis, schedule, stage and choice at least once.
#[test]
fn layouts_of_gpt2_train_alike() {
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
    alike(GPT2, "", &layouts, Tolerance::F32);
}

#[test]
fn layouts_of_llama_train_alike() {
    let layouts = [
        "data=2 zero=2 recompute=full train.micro_batch=3",
        "tensor=4",
        "context=2 context_kind=ulysses zero=3",
        "pipe=4",
        "pipe=2 schedule=interleaved recompute=full",
        "tensor=2 context=2 context_kind=ulysses pipe=2",
        "data=2 zero=3 tensor=2 sequence=true context=2 pipe=2 schedule=zb-h1",
    ];
    alike(LLAMA, "", &layouts, Tolerance::F32);
}

#[test]
fn layouts_of_experts_train_alike() {
    let layouts = [
        "data=2 expert=2",
        "data=4 expert=2 zero=3 shard=4",
        "context=2 expert=2",
        "data=2 expert=2 tensor=2 sequence=true",
        "data=2 expert=2 zero=2 pipe=2 schedule=zb-h1 recompute=full",
    ];
    alike(MOE, "", &layouts, Tolerance::F32);
}

/// Products of everything that GPT-2 and Llama can be cut along.
fn dense(model: &str) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let mut add = |words: &str| all.push(words.into());
    // Each axis alone. Two heads of keys are not shared by three ranks.
    let thirds = if model == GPT2 { &[2, 3, 4][..] } else { &[2, 4] };
    for degree in [2, 3, 4] {
        add(&format!("data={degree}"));
        add(&format!("context={degree}"));
        for schedule in ["1f1b", "gpipe", "zb-h1", "zb-h2"] {
            add(&format!("pipe={degree} schedule={schedule}"));
        }
    }
    for degree in thirds {
        add(&format!("tensor={degree}"));
        add(&format!("tensor={degree} sequence=true"));
        add(&format!("context={degree} context_kind=ulysses"));
    }
    add("context=4 context_kind=both");
    add("pipe=2 schedule=interleaved");
    // What ZeRO cuts, with each axis beside it.
    for zero in 1..=3 {
        for axis in ["", "tensor=2 sequence=true", "context=2", "pipe=2", "pipe=2 schedule=zb-h1"] {
            add(&format!("data=2 zero={zero} {axis}"));
        }
        add(&format!("context=3 zero={zero}"));
        add(&format!("data=4 zero={zero} shard=2"));
        add(&format!("data=2 context=2 zero={zero} shard=2 pipe=2"));
    }
    add("data=3 zero=3 keep_gathered=true recompute=full");
    // Other micro-batches, and what is computed again.
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
    // All four.
    for words in [
        "data=2 tensor=2 context=2 pipe=2",
        "data=2 zero=3 tensor=2 sequence=true context=2 pipe=2 schedule=zb-h1",
        "data=2 zero=2 shard=2 tensor=2 sequence=true context=2 context_kind=ulysses pipe=2 schedule=interleaved recompute=full",
    ] {
        add(words);
    }
    all
}

/// Experts dealt out beside every other axis.
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
fn every_layout_of_gpt2_trains_alike() {
    alike(GPT2, "", &dense(GPT2), Tolerance::F32);
}

#[test]
#[ignore = "minutes; see CONTRIBUTING.md"]
fn every_layout_of_llama_trains_alike() {
    alike(LLAMA, "", &dense(LLAMA), Tolerance::F32);
}

#[test]
#[ignore = "minutes; see CONTRIBUTING.md"]
fn every_layout_of_experts_trains_alike() {
    alike(MOE, "", &experts(), Tolerance::F32);
}

#[test]
fn a_layout_repeats_to_the_bit() {
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
fn layouts_train_alike_in_bf16() {
    let layouts = ["data=2 zero=3", "tensor=2 sequence=true", "context=2", "pipe=2 schedule=zb-h1"];
    alike(GPT2, "precision.compute=bf16", &layouts, Tolerance::BF16);
    alike(MOE, "precision.compute=bf16", &["data=2 expert=2 zero=1"], Tolerance::BF16);
}

/// Where gradients are kept in bf16 they are rounded once for every micro-batch and once when ranks' are summed, in
/// other places on every layout.
#[test]
fn layouts_train_alike_with_gradients_in_bf16() {
    let layouts = [
        "data=2",
        "data=4 zero=1",
        "data=4 zero=2 shard=2",
        "data=4 zero=3",
        "tensor=2 sequence=true",
        "data=2 zero=2 pipe=2 schedule=zb-h1",
    ];
    alike(GPT2, "precision.gradients=bf16", &layouts, Tolerance::BF16);
    let also = "precision.compute=bf16 precision.gradients=bf16";
    alike(LLAMA, also, &["data=4 zero=3", "tensor=2 pipe=2"], Tolerance::BF16);
    alike(MOE, also, &["data=2 expert=2 zero=1"], Tolerance::BF16);
}

/// Masks follow from what is dropped, not from who drops it.
#[test]
fn layouts_drop_out_the_same() {
    let layouts = [
        "data=3",
        "data=2 zero=3 recompute=full",
        "tensor=2",
        "tensor=2 sequence=true",
        "context=2",
        "context=2 context_kind=ulysses",
        "pipe=2 schedule=zb-h1 train.micro_batch=2",
    ];
    alike(GPT2, "model.dropout=0.1", &layouts, Tolerance::F32);
}
