//! One node of A100s with small models: 720 layouts, from vTrain's repository. Megatron-DeepSpeed, f16, everything
//! recomputed. The file calls its times measured, but within a layout they grow with the micro-batches in equal steps
//! to the last digit: they were composed from measured parts and have no run-to-run noise.

use super::{Gpt, Row, options, plan, read};
use lockstep_sim::{Cluster, Software};

pub fn vtrain() -> Vec<Row> {
    let rows = read(include_str!("../../measured/vtrain_measured_single.csv"));
    rows.iter()
        .map(|row| {
            let [gpus, gbs, mbs, tp, dp, pp] = ["gpus", "gbs", "mbs", "tp", "dp", "pp"].map(|name| row.count(name));
            let model = Gpt {
                dim: row.count("hidden"),
                heads: row.count("heads"),
                layers: row.count("layers"),
                seq: row.count("seq_len"),
                // vTrain's default is GPT-2's own vocabulary, not padded; each rank has as many whole rows as there are.
                vocab: 50257 / tp * tp,
                dropout: 0.1,
            };
            let text = format!(
                "{}[train]\nglobal_batch = {gbs}\nmicro_batch = {mbs}\n[layout]\nplacement = \"pipe, data, context, tensor\"\ndata = {dp}\ntensor = {tp}\npipe = {pp}\n\
                 recompute = \"full\"\n[precision]\ncompute = \"bf16\"\n",
                model.model()
            );
            Row {
                name: format!("h{} L{} gbs{gbs} mbs{mbs} tp{tp} dp{dp} pp{pp}", model.dim, model.layers),
                group: format!("h{} L{} on {gpus}", model.dim, model.layers),
                plan: plan(&text, gpus),
                cluster: Cluster::built_in("a100-80").unwrap(),
                options: options(Software::megatron_deepspeed()),
                seconds: row.number("iter_ms").map(|ms| ms / 1e3),
                bytes: None,
                failed: false,
            }
        })
        .collect()
}
