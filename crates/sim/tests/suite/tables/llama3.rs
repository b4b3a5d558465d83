//! Llama 3 405B as it was trained on up to 16,384 H100s (Table 4 of its paper): tensor inside a host, interleaved
//! pipelines, sharded states, blocks that stay gathered.

use super::{Cells, Row, options, plan, read};
use lockstep_sim::{Cluster, Software};

/// The paper does not state the number of stages per rank: the fastest even split is used. The printed rates are assumed to
/// count causal attention; at 8 thousand tokens this hardly matters.
pub fn llama3() -> Vec<Row> {
    read(include_str!("../../measured/llama3_table4.csv")).iter().map(fastest).collect()
}

fn fastest(row: &Cells) -> Row {
    let rows = [1, 2, 4].map(|chunks| with_chunks(row, chunks));
    let time = |row: &Row| row.estimate().step_s;
    rows.into_iter().min_by(|a, b| time(a).total_cmp(&time(b))).unwrap()
}

fn with_chunks(row: &Cells, chunks: usize) -> Row {
    let [gpus, tp, cp, pp, dp, seq, each] =
        ["gpus", "tp", "cp", "pp", "dp", "seq_len", "batch_per_dp"].map(|name| row.count(name));
    let kind = if chunks > 1 { "interleaved" } else { "1f1b" };
    let text = format!(
        "[model]\npreset = \"llama3-405b\"\n[data]\nseq = {seq}\n[train]\nglobal_batch = {}\nmicro_batch = 1\n\
         [layout]\nplacement = \"pipe, data, context, tensor\"\ndata = {dp}\nzero = 3\nkeep_gathered = true\n\
         tensor = {tp}\nsequence = true\ncontext = {cp}\npipe = {pp}\nschedule = \"{kind}\"\nchunks = {chunks}\n\
         [precision]\ncompute = \"bf16\"\n",
        dp * each,
    );
    let plan = plan(&text, gpus);
    let flops = lockstep_plan::model::flops_per_token(&plan.model, seq).total();
    let rate = row.number("tflops_per_gpu").unwrap() * 1e12 * gpus as f64;
    Row {
        name: format!("{gpus} ranks tp{tp} cp{cp} pp{pp}x{chunks} dp{dp} s{seq}"),
        group: String::new(),
        seconds: Some(plan.tokens_per_step() as f64 * flops / rate),
        plan,
        cluster: Cluster::built_in("h100").unwrap(),
        // Parameters are not resharded after the forward pass, and gradients are reduced once per step.
        options: options(Software { accumulates_unsharded: true, ..Software::megatron_2025() }),
        bytes: None,
        failed: false,
    }
}
