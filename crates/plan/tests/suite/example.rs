//! The run file of the documentation, key by key.

use lockstep_plan::context::ContextKind;
use lockstep_plan::model::{Balance, Family};
use lockstep_plan::schedule::ScheduleKind;
use lockstep_plan::{
    Compression, Config, Dtype, Environment, Layout, Mesh, Offload, Plan, Recompute, Source,
};

const EXAMPLE: &str = r#"
name = "small"
[model]                       # preset = "gpt2-124m", or:
family = "llama"              # gpt2 | llama | moe
dim = 512                     # layers, heads, kv_heads, ffn, vocab, seq, experts, top_k …
[data]
source = "builtin:grammar"    # or a token file
[train]
steps = 1000
global_batch = 32             # sequences per optimizer step = micro_batch × accumulation × data
micro_batch = 4
lr = 3e-4                     # warmup, schedule, weight_decay, clip, seed …
[layout]
data = 2                      # zero = 0..3, shard = …
tensor = 1                    # sequence = true
context = 1                   # context_kind = "ring" | "ulysses" | "both"
pipe = 1                      # schedule = "gpipe" | "1f1b" | "interleaved" | "zb-h1" | "zb-h2"
expert = 1
recompute = "none"            # none | selective | full
[precision]
compute = "bf16"              # f32 | bf16
[comm]
bucket_mb = 25                # compression = "none" | "bf16" | "int8" | "topk:0.01", timeout_s …
[checkpoint]
every = 100
keep = 3
"#;

#[test]
fn resolves_the_documented_example() {
    let config = Config::parse(EXAMPLE, &[]);
    assert_eq!(config.ranks(), 2);
    let plan = Plan::resolve(&config, &Environment::one_host(2, 16).with_vocab(77)).unwrap();
    assert_eq!(plan.name, "small");
    assert_eq!((plan.model.family, plan.model.dim, plan.model.vocab), (Family::Llama, 512, 77));
    assert_eq!(
        (plan.model.heads, plan.model.kv_heads, plan.model.head_dim, plan.model.ffn),
        (8, 8, 64, 1408)
    );
    assert_eq!(plan.data.source, Source::Builtin("grammar".into()));
    assert_eq!((plan.train.steps, plan.train.global_batch, plan.train.micro_batch), (1000, 32, 4));
    assert_eq!(
        (plan.train.accumulation, plan.local_batch(), plan.tokens_per_step()),
        (4, 16, 32 * 128)
    );
    assert_eq!((plan.ranks, plan.layout.data, plan.layout.recompute), (2, 2, Recompute::None));
    assert_eq!((plan.precision.compute, plan.train.threads), (Dtype::Bf16, 8));
    assert_eq!((plan.comm.bucket_bytes, plan.comm.timeout_s), (25 << 20, 30.0));
    assert_eq!((plan.checkpoint.every, plan.checkpoint.keep), (100, 3));
    assert_eq!((plan.lr(100), plan.lr(1000)), (3e-4, 3e-4 / 10.0));
}

/// The data is opened before the plan is resolved, so both must name the same source.
#[test]
fn config_and_plan_name_the_same_source() {
    for (text, source) in
        [("", "builtin:grammar"), ("[data]\nsource = \"tokens.bin\"", "tokens.bin")]
    {
        let config = Config::parse(text, &["model.preset=gpt2-test".into()]);
        let env = Environment::one_host(1, 1).with_vocab(256);
        let plan = Plan::resolve(&config, &env).unwrap();
        assert_eq!(config.source(), source);
        assert_eq!(String::from(plan.data.source), source);
    }
}

#[test]
fn every_other_key_is_resolved() {
    let text = r#"
[model]
preset = "mixtral-8x7b"
family = "moe"
dim = 64
layers = 2
heads = 4
kv_heads = 2
head_dim = 32
ffn = 48
vocab = 100
seq = 32
tied = true
norm_eps = 1e-6
dropout = 0.1
rope_theta = 1e4
rope_scaling = { factor = 2.0, low_freq_factor = 1, high_freq_factor = 2, original_seq = 16 }
experts = 4
top_k = 1
capacity = 1.25
aux_loss = 0.5
balance = "batch"
z_loss = 0
shared_experts = 1
[data]
source = "tokens/train.bin"
seq = 16
held_out = 0.2
max_corrupt = 5
[train]
min_lr = 1e-5
warmup = 1e1
schedule = "wsd"
decay = 0.5
betas = [0.8, 0.9]
eps = 1e-6
weight_decay = 0
clip = 0
seed = 7
eval_every = 5
eval_batches = 2
log_every = 1
threads = 3
sample = "the cat"
sample_tokens = 9
[layout]
zero = 0
shard = 1
sequence = false
context_kind = "ring"
schedule = "1f1b"
keep_gathered = false
chunks = 1
placement = "pipe, data, context, tensor"
[comm]
compression = "topk:0.01"
timeout_s = 2.5
overlap = true
"#;
    let config = Config::parse(text, &[]);
    let plan = Plan::resolve(&config, &Environment::one_host(1, 4)).unwrap();
    let moe = plan.model.moe.unwrap();
    assert_eq!(
        (plan.model.dim, plan.model.heads, plan.model.head_dim, plan.model.ffn),
        (64, 4, 32, 48)
    );
    assert_eq!((plan.model.seq, plan.data.seq, plan.model.vocab), (32, 16, 100));
    assert_eq!(
        (moe.experts, moe.top_k, moe.capacity, moe.aux_loss, moe.z_loss),
        (4, 1, Some(1.25), 0.5, 0.0)
    );
    assert_eq!((moe.balance, moe.shared), (Balance::Batch, 1));
    assert_eq!((plan.model.tied, plan.model.dropout, plan.model.norm_eps), (true, 0.1, 1e-6));
    assert_eq!(plan.model.rope_scaling.unwrap().original_seq, 16);
    assert_eq!(plan.data.source, Source::File("tokens/train.bin".into()));
    assert_eq!((plan.data.held_out, plan.data.max_corrupt), (0.2, 5));
    let train = &plan.train;
    assert_eq!((train.lr.warmup, train.lr.decay_steps, train.lr.min), (10, 500, 1e-5));
    assert_eq!(
        (train.betas, train.eps, train.weight_decay, train.clip),
        ([0.8, 0.9], 1e-6, 0.0, None)
    );
    assert_eq!((train.seed, train.log_every, train.threads), (7, 1, 3));
    let eval = train.eval.as_ref().unwrap();
    assert_eq!((eval.every, eval.batches), (5, 2));
    let sample = train.sample.as_ref().unwrap();
    assert_eq!((sample.prompt.as_str(), sample.tokens), ("the cat", 9));
    assert_eq!((plan.comm.timeout_s, plan.comm.compression), (2.5, Compression::TopK(0.01)));
    assert_eq!((plan.comm.timeout_s, plan.comm.overlap.data), (2.5, true));
}

/// Every axis at once, on 16 ranks.
#[test]
fn every_degree_is_resolved() {
    let text = r#"
[model]
preset = "moe-test"
layers = 4
[train]
global_batch = 32
micro_batch = 4
[layout]
data = 2
zero = 3
shard = 2
keep_gathered = true
tensor = 2
sequence = true
context = 2
context_kind = "ulysses"
pipe = 2
schedule = "interleaved"
chunks = 2
expert = 4
recompute = "selective"
"#;
    let config = Config::parse(text, &[]);
    assert_eq!(config.ranks(), 16);
    let env = Environment::one_host(16, 16).with_vocab(77);
    let plan = Plan::resolve(&config, &env).unwrap();
    let layout = Layout {
        data: 2,
        zero: 3,
        shard: 2,
        keep_gathered: true,
        tensor: 2,
        sequence: true,
        context: 2,
        context_kind: ContextKind::Ulysses,
        pipe: 2,
        schedule: ScheduleKind::Interleaved,
        chunks: 2,
        expert: 4,
        recompute: Recompute::Selective,
        offload: Offload::None,
        order: Mesh::ONE.order,
    };
    assert_eq!((plan.layout.clone(), plan.mesh().ranks()), (layout, 16));
    // Only the data axis splits the samples.
    assert_eq!((plan.train.accumulation, plan.local_batch()), (4, 16));
}

#[test]
fn every_layout_option_is_known() {
    let resolve = |text: &str| {
        let config = Config::parse(text, &["model.preset=llama-test".into()]);
        let env = Environment::one_host(config.ranks(), 1).with_vocab(64);
        Plan::resolve(&config, &env).unwrap_or_else(|errors| panic!("{text}: {errors:?}"))
    };
    for kind in ScheduleKind::ALL {
        let plan = resolve(&format!("[layout]\npipe = 2\nchunks = 1\nschedule = \"{kind}\""));
        assert_eq!((plan.layout.schedule, plan.schedule().kind), (kind, kind));
    }
    for (word, kind) in [
        ("ring", ContextKind::Ring),
        ("ulysses", ContextKind::Ulysses),
        ("both", ContextKind::Both),
    ] {
        let plan = resolve(&format!("[layout]\ncontext = 2\ncontext_kind = \"{word}\""));
        assert_eq!(plan.layout.context_kind, kind);
    }
    for zero in 0..=3 {
        let plan = resolve(&format!("[layout]\ndata = 2\nzero = {zero}"));
        // By default, states are sharded across all replicas.
        assert_eq!((plan.layout.zero, plan.layout.shard), (zero, if zero == 0 { 1 } else { 2 }));
    }
}
