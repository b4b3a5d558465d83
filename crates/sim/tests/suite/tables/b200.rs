//! Eight B200s with Megatron-Core, from SimuMax's repository. Its rows of DeepSeek models are left out: their
//! attention is not one of the plan's.

use super::{Row, options, plan, read};
use lockstep_sim::{Cluster, Software};

pub fn b200() -> Vec<Row> {
    let rows = read(include_str!("../../measured/simumax_b200_measured.csv"));
    rows.iter()
        .filter(|row| row.text("model").starts_with("llama3"))
        .map(|row| {
            let [layers, tp, cp, pp, dp, seq, micros] =
                ["layers", "tp", "cp", "pp", "dp", "seq_len", "microbatch_count"].map(|name| row.count(name));
            let preset = row.text("model").replace("llama3_", "llama3-");
            let text = format!(
                "[model]\npreset = \"{preset}\"\nlayers = {layers}\nseq = {seq}\n[train]\nglobal_batch = {}\nmicro_batch = 1\n\
                 [layout]\nplacement = \"pipe, data, context, tensor\"\ndata = {dp}\nzero = 1\ntensor = {tp}\nsequence = {}\ncontext = {cp}\ncontext_kind = \"ulysses\"\n\
                 pipe = {pp}\n[precision]\ncompute = \"bf16\"\n",
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
        })
        .collect()
}
