//! Steps of one H200 that were measured with `lockstep bench step`, in bf16, compared with predictions from what `lockstep
//! bench machine` measured on it.

use lockstep_plan::{Config, Plan};
use lockstep_sim::{Cluster, Options, estimate};

const LLAMA_1B: &str = "family = \"llama\"\ndim = 2048\nlayers = 16\nheads = 32\nkv_heads = 8\nffn = 8192\n\
                        vocab = 128256\ntied = true\n";
const EXPERTS: &str = "family = \"moe\"\nvocab = 50304\ntied = true\nffn = 2048\nexperts = 8\ntop_k = 2\n\
                       aux_loss = 0.0\nz_loss = 0.0\n";

fn model(family: &str, [dim, layers, heads, vocab]: [usize; 4]) -> String {
    format!(
        "family = \"{family}\"\ndim = {dim}\nlayers = {layers}\nheads = {heads}\nvocab = {vocab}\ntied = true\n"
    )
}

/// A plan with a batch, a micro-batch and a layout such as `data=2 zero=1`.
fn plan_on(
    cluster: &Cluster,
    ranks: usize,
    model: &str,
    seq: usize,
    [batch, micro]: [usize; 2],
    layout: &str,
) -> Plan {
    let text = format!(
        "[model]\n{model}seq = {seq}\n[data]\nseq = {seq}\n[train]\nglobal_batch = {batch}\nmicro_batch = {micro}\n\
         [precision]\ncompute = \"bf16\"\n[device]\nkind = \"cuda\"\n"
    );
    let config = Config::parse(&text, &[]).with_layout(layout);
    Plan::resolve(&config, &cluster.environment(ranks, None)).unwrap()
}

#[test]
fn steps_of_an_h200_are_predicted_within_a_tenth() {
    let cluster = Cluster::parse(include_str!("../measured/h200.toml")).unwrap();
    let gpt2 = |dim, layers, heads, vocab| model("gpt2", [dim, layers, heads, vocab]);
    let small = gpt2(768, 12, 12, 50304);
    let tiny = gpt2(128, 4, 4, 264);
    let experts = format!("{EXPERTS}dim = 768\nlayers = 12\nheads = 12\n");
    // Model, sequence length, batch and micro-batch, and measured milliseconds.
    let measured = [
        (small.clone(), 1024, [16, 16], 29.5),
        (small.clone(), 1024, [16, 4], 33.6),
        (small.clone(), 1024, [16, 2], 40.8),
        (small.clone(), 1024, [32, 32], 55.7),
        (small, 1024, [64, 64], 108.7),
        (gpt2(1024, 24, 16, 50304), 1024, [16, 16], 77.7),
        (gpt2(1600, 48, 25, 50304), 1024, [8, 8], 168.6),
        (LLAMA_1B.into(), 4096, [4, 4], 248.6),
        (LLAMA_1B.into(), 8192, [2, 2], 282.5),
        (experts, 1024, [16, 16], 53.4),
        // Most of their kernels are too small to fill the GPU.
        (tiny.clone(), 128, [4, 4], 0.520),
        (tiny.clone(), 128, [16, 16], 0.626),
        (tiny, 128, [64, 64], 0.971),
        (gpt2(256, 8, 4, 1024), 256, [8, 8], 1.382),
        (gpt2(384, 6, 6, 4096), 512, [4, 4], 1.319),
        (gpt2(512, 8, 8, 8192), 512, [4, 4], 2.187),
        (model("llama", [256, 6, 4, 1024]) + "ffn = 768\n", 256, [16, 16], 1.208),
    ];
    for (model, seq, batch, milliseconds) in measured {
        let plan = plan_on(&cluster, 1, &model, seq, batch, "");
        let predicted = 1e3 * estimate(&plan, &cluster, &Options::default()).step_s;
        let error = predicted / milliseconds - 1.0;
        let what = format!("{} of {}, batch {batch:?}", plan.model.family.name(), plan.model.dim);
        println!(
            "{what}: {predicted:.2} ms predicted, {milliseconds} measured ({:+.1}%)",
            100.0 * error
        );
        assert!(error.abs() < 0.1, "{what}: {predicted} ms, not {milliseconds}");
    }
}

/// Two processes on one H200, as `bench/peers/gpu/ranks.py` runs them.
#[test]
fn steps_of_two_ranks_on_an_h200_are_predicted() {
    let one = Cluster::parse(include_str!("../measured/h200.toml")).unwrap();
    let cluster = one.shared_by(2, true);
    let small = model("gpt2", [768, 12, 12, 50304]);
    let small = ("GPT-2 124M", small.as_str(), 1024, 16);
    let llama = ("Llama 1B", LLAMA_1B, 4096, 4);
    // Model, layout, fraction of the batch in a micro-batch, and measured tokens/s.
    let rows = [
        (small, "data=2", 2, 515_118.0),
        (small, "data=2 zero=1", 2, 513_645.0),
        (small, "data=2 zero=2", 2, 514_270.0),
        (small, "data=2 zero=3", 2, 502_334.0),
        (small, "tensor=2 sequence=true", 1, 418_792.0),
        (small, "pipe=2", 8, 410_706.0),
        (llama, "data=2", 2, 60_575.0),
        (llama, "data=2 zero=1", 2, 62_097.0),
        (llama, "data=2 zero=2", 2, 62_293.0),
        (llama, "data=2 zero=3", 2, 61_389.0),
        (llama, "tensor=2 sequence=true", 1, 59_530.0),
        (llama, "pipe=2", 4, 62_329.0),
    ];
    for ((name, model, seq, batch), layout, parts, tokens_per_s) in rows {
        let plan = plan_on(&cluster, 2, model, seq, [batch, batch / parts], layout);
        let found = estimate(&plan, &cluster, &Options::default());
        let measured = (batch * seq) as f64 / tokens_per_s;
        let error = found.step_s / measured - 1.0;
        println!(
            "{name} {layout}: {:.1} ms predicted, {:.1} measured ({:+.1}%); exposed {:.1}%",
            1e3 * found.step_s,
            1e3 * measured,
            100.0 * error,
            100.0 * found.time.exposed() / found.step_s
        );
        assert!(error.abs() < 0.1, "{name} {layout}: {error}");
    }
}
