//! nanotron's best layouts on 8 to 512 H100s.

use super::{Row, options, plan, read};
use lockstep_sim::{Cluster, Software};

pub fn nanotron() -> Vec<Row> {
    let rows = read(include_str!("../../measured/nanotron_best_configs.csv"));
    rows.iter()
        .map(|row| {
            let [gpus, dp, tp, pp, mbs] = ["gpus", "dp", "tp", "pp", "mbs"].map(|name| row.count(name));
            let [dim, heads, keys, ffn, layers, vocab, seq] =
                ["hidden", "heads", "kv_heads", "ffn", "layers", "vocab", "seq_len"].map(|name| row.count(name));
            let gbs = mbs * dp * row.count("gas");
            let text = format!(
                "[model]\nfamily = \"llama\"\ndim = {dim}\nheads = {heads}\nkv_heads = {keys}\nffn = {ffn}\nlayers = {layers}\n\
                 vocab = {vocab}\nseq = {seq}\ntied = {}\n[train]\nglobal_batch = {gbs}\nmicro_batch = {mbs}\n\
                 [layout]\nplacement = \"pipe, data, context, tensor\"\ndata = {dp}\nzero = {}\ntensor = {tp}\nsequence = {}\npipe = {pp}\n\
                 [precision]\ncompute = \"bf16\"\n",
                row.text("embeddings") == "tied",
                if dp > 1 { row.count("zero_stage") } else { 0 },
                tp > 1,
            );
            let plan = plan(&text, gpus);
            // nanotron's MFU: 6 FLOPs per parameter plus the full square of attention.
            let flops = lockstep_plan::model::flops_per_token(&plan.model, seq);
            let per_step = plan.tokens_per_step() as f64 * (flops.weights + 2.0 * flops.attention);
            let seconds = per_step / (row.number("mfu_pct").unwrap() / 100.0 * 989e12 * gpus as f64);
            Row {
                name: format!("{}B dp{dp} tp{tp} pp{pp} mbs{mbs} gas{}", row.text("params_B"), row.count("gas")),
                group: String::new(),
                plan,
                cluster: Cluster::built_in("h100").unwrap(),
                options: options(Software::nanotron()),
                seconds: Some(seconds),
                bytes: row.number("mem_gb").map(|gb| gb * 1e9),
                failed: false,
            }
        })
        .collect()
}
