//! Qwen3-235B, a mixture of 128 experts, with Megatron-Core on 256 H100s and GB200s, from NVIDIA's model zoo.

use super::{Cells, Row, options, plan, read};
use lockstep_plan::model::flops_per_token;
use lockstep_sim::{Cluster, Selective, Software};

/// The bf16 rows, without those that overlap expert communication with other micro-batches, which is not modelled, and
/// without Qwen3-Next, whose attention is not supported.
pub fn qwen3() -> Vec<Row> {
    let rows = read(include_str!("../../measured/megatron_moe_qwen3.csv"));
    let understood = |row: &&Cells| {
        row.text("model") == "Qwen3-235B"
            && row.text("precision") == "BF16"
            && !row.text("notes").contains("1f1b overlap")
    };
    rows.iter().filter(understood).map(parsed).collect()
}

fn parsed(row: &Cells) -> Row {
    let [gpus, tp, cp, ep, pp, seq, gbs] =
        ["gpus", "tp", "cp", "ep", "pp", "seq_len", "gbs"].map(|name| row.count(name));
    let (dp, mbs) = (gpus / tp / cp / pp, row.number("mbs").unwrap_or(1.0) as usize);
    // 94 layers on 96 stages: embedding and head count as layers.
    let chunks = row.count("vpp").min(94 / pp);
    let kind = if chunks > 1 && pp > 1 { "interleaved" } else { "1f1b" };
    let recompute = match row.text("recompute") {
        "full" => "full",
        // Recomputes norms and activations, which is nearly free.
        "" | "norm,act" => "none",
        _ => "selective",
    };
    // The tensor axis distributes whole experts, so experts are on `tp` times as many ranks.
    let text = format!(
        "[model]\nfamily = \"moe\"\ndim = 4096\nheads = 64\nkv_heads = 4\nhead_dim = 128\nffn = 1536\nlayers = 94\n\
         vocab = 151936\nseq = {seq}\nexperts = 128\ntop_k = 8\n[train]\nglobal_batch = {gbs}\nmicro_batch = {mbs}\n\
         [layout]\nplacement = \"pipe, data, context, tensor\"\ndata = {dp}\nzero = {}\ntensor = {tp}\nsequence = {}\n\
         context = {cp}\npipe = {pp}\nschedule = \"{kind}\"\nchunks = {}\nexpert = {}\nrecompute = \"{recompute}\"\n\
         [precision]\ncompute = \"bf16\"\n",
        if row.text("fsdp") == "On" { 3 } else { 1 },
        tp > 1,
        if pp > 1 { chunks } else { 1 },
        ep / tp,
    );
    let plan = plan(&text, gpus);
    let flops = plan.tokens_per_step() as f64 * flops_per_token(&plan.model, seq).total();
    let from_rate = flops / (row.number("tflops_per_gpu").unwrap() * 1e12 * gpus as f64);
    let software = Software {
        selective: Selective::FeedForward,
        once_per_host: row.text("dispatcher") != "A2A",
        ..Software::megatron_2025()
    };
    let gpu = row.text("gpu");
    Row {
        name: format!(
            "{gpu} {} s{seq} tp{tp} cp{cp} ep{ep} pp{pp}x{chunks} {recompute}",
            row.text("dispatcher")
        ),
        group: String::new(),
        cluster: Cluster::built_in(&gpu.to_lowercase()).unwrap(),
        options: options(software),
        seconds: Some(row.number("step_s").unwrap_or(from_rate)),
        plan,
        bytes: None,
        failed: false,
    }
}
