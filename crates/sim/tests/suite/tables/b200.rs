//! Eight B200s with Megatron-Core, from SimuMax's repository: Llama 3 and DeepSeek with few layers.

use super::{Cells, Row, options, plan, read};
use lockstep_sim::{Cluster, Software};

/// Rows that were used to choose constants.
pub fn b200() -> Vec<Row> {
    rows(include_str!("../../measured/simumax_b200_measured.csv"))
}

/// The rest of the same table.
pub fn b200_others() -> Vec<Row> {
    rows(include_str!("../../measured/simumax_b200_others.csv"))
}

fn rows(text: &str) -> Vec<Row> {
    read(text).iter().map(row).collect()
}

fn row(row: &Cells) -> Row {
    let [layers, tp, cp, ep, pp, dp, seq, micros] =
        ["layers", "tp", "cp", "ep", "pp", "dp", "seq_len", "microbatch_count"]
            .map(|name| row.count(name));
    let text = format!(
        "[model]\n{}\nlayers = {layers}\nseq = {seq}\n[train]\nglobal_batch = {}\nmicro_batch = 1\n\
         [layout]\nplacement = \"pipe, data, context, tensor\"\ndata = {dp}\nzero = 1\ntensor = {tp}\nsequence = {}\ncontext = {cp}\ncontext_kind = \"ulysses\"\n\
         pipe = {pp}\nexpert = {ep}\n[precision]\ncompute = \"bf16\"\n",
        model(row.text("model")),
        dp * micros,
        tp > 1,
    );
    Row {
        name: row.text("case").trim_end_matches("_cef").to_string(),
        group: String::new(),
        plan: plan(&text, row.count("gpus")),
        cluster: Cluster::built_in("b200").unwrap(),
        options: options(Software::megatron_core()),
        seconds: row.number("real_ms").map(|ms| ms / 1e3),
        bytes: row.number("real_alloc_GiB").map(|gib| gib * (1u64 << 30) as f64),
        failed: false,
    }
}

/// Experts were balanced (capacity 1), and one layer was dense, also for DeepSeek-V3.
fn model(name: &str) -> &'static str {
    match name {
        "llama3_70b" => "preset = \"llama3-70b\"",
        "llama3_405b" => "preset = \"llama3-405b\"",
        "deepseekv2" => "preset = \"deepseek-v2\"\ndense_layers = 1\ncapacity = 1.0",
        "deepseekv3" => "preset = \"deepseek-v3\"\ndense_layers = 1\ncapacity = 1.0",
        other => panic!("what is {other}?"),
    }
}
