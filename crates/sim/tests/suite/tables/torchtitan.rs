//! torchtitan on H100s: Llama 3.1 with FSDP, tensor, pipeline and context parallelism.

use super::{Row, options, plan, read};
use lockstep_sim::{Cluster, Options, Software};

pub fn torchtitan() -> Vec<Row> {
    let rows = read(include_str!("../../measured/torchtitan_h100.csv"));
    rows.iter()
        .map(|row| {
            let [gpus, fsdp, tp, pp, cp] = ["gpus", "fsdp", "tp", "pp", "cp"].map(|name| row.count(name));
            let (seq, local) = (row.count("seq_len"), row.count("local_bs"));
            let preset = match row.text("model") {
                "Llama3.1-8B" => "llama3-8b",
                "Llama3.1-70B" => "llama3-70b",
                _ => "llama3-405b",
            };
            let interleaved = row.text("pp_schedule").starts_with("Interleaved");
            // By default a pipeline has as many micro-batches as ranks.
            let mbs = local / pp;
            let (kind, chunks) = if interleaved { ("interleaved", 2) } else { ("1f1b", 1) };
            let text = format!(
                "[model]\npreset = \"{preset}\"\nseq = {seq}\n[train]\nglobal_batch = {}\nmicro_batch = {mbs}\n\
                 [layout]\nplacement = \"pipe, data, context, tensor\"\ndata = {fsdp}\nzero = 3\nkeep_gathered = {}\ntensor = {tp}\nsequence = {}\ncontext = {cp}\n\
                 pipe = {pp}\nschedule = \"{kind}\"\nchunks = {chunks}\nrecompute = \"{}\"\n\
                 [precision]\ncompute = \"bf16\"\n",
                local * fsdp,
                pp > 1,
                tp > 1,
                row.text("act_ckpt"),
            );
            let compiled = row.text("technique").contains("compile");
            let mut software =
                if compiled { Software::torchtitan_compiled() } else { Software::torchtitan() };
            software.tensor_overlap = row.text("technique").contains("AsyncTP");
            let plan = plan(&text, gpus);
            let tokens = plan.tokens_per_step() as f64;
            let rate = row.number("tps_per_gpu").unwrap() * gpus as f64;
            Row {
                name: format!("{} {} s{seq} {}", row.text("model"), row.text("technique"), row.text("pp_schedule")),
                group: String::new(),
                plan,
                cluster: Cluster::built_in("h100-96").unwrap(),
                options: Options { fp8: row.text("precision") == "fp8", ..options(software) },
                seconds: Some(tokens / rate),
                bytes: row.number("mem_GiB").map(|gib| gib * (1u64 << 30) as f64),
                failed: false,
            }
        })
        .collect()
}
