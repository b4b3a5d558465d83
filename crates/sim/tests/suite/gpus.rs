//! Steps of one H200 that were measured with `lockstep bench step`, in bf16, compared with predictions from what `lockstep
//! bench machine` measured on it.

use lockstep_plan::{Config, Plan};
use lockstep_sim::{Cluster, Options, estimate};

const GPT2: &str = "family = \"gpt2\"\nvocab = 50304\nseq = 1024\ntied = true\n";
const LLAMA_1B: &str = "family = \"llama\"\ndim = 2048\nlayers = 16\nheads = 32\nkv_heads = 8\nffn = 8192\n\
                        vocab = 128256\ntied = true\n";
const EXPERTS: &str = "family = \"moe\"\nvocab = 50304\nseq = 1024\ntied = true\nffn = 2048\nexperts = 8\ntop_k = 2\n\
                       aux_loss = 0.0\nz_loss = 0.0\n";

fn plan(cluster: &Cluster, model: &str, seq: usize, batch: usize) -> Plan {
    let text = format!(
        "[model]\n{model}[data]\nseq = {seq}\n[train]\nglobal_batch = {batch}\nmicro_batch = {batch}\n\
         [precision]\ncompute = \"bf16\"\n[device]\nkind = \"cuda\"\n"
    );
    Plan::resolve(&Config::parse(&text, &[]), &cluster.environment(1, None)).unwrap()
}

#[test]
fn steps_of_an_h200_are_predicted_within_a_tenth() {
    let cluster = Cluster::parse(include_str!("../measured/h200.toml")).unwrap();
    let gpt2 =
        |dim, layers, heads| format!("{GPT2}dim = {dim}\nlayers = {layers}\nheads = {heads}\n");
    let small = gpt2(768, 12, 12);
    let llama = |seq| format!("{LLAMA_1B}seq = {seq}\n");
    let experts = format!("{EXPERTS}dim = 768\nlayers = 12\nheads = 12\n");
    // Model, sequence length, batch, and measured milliseconds.
    let measured = [
        (small.clone(), 1024, 16, 29.9),
        (small.clone(), 1024, 32, 56.9),
        (small, 1024, 64, 115.6),
        (gpt2(1024, 24, 16), 1024, 16, 79.7),
        (gpt2(1600, 48, 25), 1024, 8, 171.8),
        (llama(4096), 4096, 4, 250.4),
        (llama(8192), 8192, 2, 285.0),
        (experts, 1024, 16, 55.0),
    ];
    for (model, seq, batch, milliseconds) in measured {
        let plan = plan(&cluster, &model, seq, batch);
        let predicted = 1e3 * estimate(&plan, &cluster, &Options::default()).step_s;
        let error = predicted / milliseconds - 1.0;
        assert!(error.abs() < 0.1, "{model}batch {batch}: {predicted} ms, not {milliseconds}");
    }
}
