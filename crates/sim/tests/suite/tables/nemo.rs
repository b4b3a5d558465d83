//! NeMo with long sequences on H100s, in 8 bits: Llama 2 7B from 4 thousand to a million tokens. The rows on B200s
//! print replicas that do not multiply to their ranks, and are skipped.

use super::{Row, options, plan, read};
use lockstep_sim::{Cluster, Options, Software};

pub fn nemo() -> Vec<Row> {
    let rows = read(include_str!("../../measured/nemo_long_sequence_cp.csv"));
    rows.iter()
        .filter(|row| row.text("system") == "H100")
        .map(|row| {
            let [gpus, gbs, tp, pp, dp, cp] = ["gpus", "gbs", "tp", "pp", "dp", "cp"].map(|name| row.count(name));
            let seq = 1024 * row.count("seqlen_k");
            let text = format!(
                "[model]\nfamily = \"llama\"\ndim = 4096\nheads = 32\nffn = 11008\nlayers = 32\nvocab = 32000\nseq = {seq}\n\
                 [train]\nglobal_batch = {gbs}\nmicro_batch = 1\n[layout]\nplacement = \"pipe, data, context, tensor\"\n\
                 data = {dp}\nzero = 1\ntensor = {tp}\nsequence = {}\ncontext = {cp}\npipe = {pp}\n\
                 [precision]\ncompute = \"bf16\"\n",
                tp > 1,
            );
            let plan = plan(&text, gpus);
            // The printed rate counts the full square of attention.
            let flops = lockstep_plan::model::flops_per_token(&plan.model, seq);
            let all = plan.tokens_per_step() as f64 * (flops.weights + 2.0 * flops.attention);
            let rate = row.number("tflops_with_cp").unwrap() * 1e12 * gpus as f64;
            Row {
                name: format!("{}k tp{tp} pp{pp} dp{dp} cp{cp}", row.text("seqlen_k")),
                group: String::new(),
                plan,
                cluster: Cluster::built_in("h100").unwrap(),
                options: Options { fp8: true, ..options(Software::nemo()) },
                seconds: Some(all / rate),
                bytes: None,
                failed: false,
            }
        })
        .collect()
}
