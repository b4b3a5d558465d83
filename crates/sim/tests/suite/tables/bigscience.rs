//! The sweep of the BLOOM team on up to 384 A100s: Megatron-DeepSpeed, ZeRO-1, everything recomputed.

use super::{Cells, Gpt, Row, options, plan, read};
use lockstep_sim::{Cluster, Software};

/// All rows with a time or a failure, except one whose note says that its columns are swapped.
pub fn bigscience() -> Vec<Row> {
    let rows = read(include_str!("../../measured/bigscience_a100_384_layout_sweep.csv"));
    rows.iter().filter(|row| understood(row)).map(parsed).collect()
}

fn understood(row: &Cells) -> bool {
    let measured = row.number("sec_per_it").is_some() || row.text("mem_gb") == "OOM";
    measured && !row.text("note").contains("swapped")
}

/// Rows from before layers were written down tell the parameters, in billions: 12 for each square of the width, and
/// the token table. Stages had equally many layers.
fn layers(row: &Cells) -> usize {
    row.number("layers").map_or_else(
        || {
            let (width, vocab) = (row.count("hidden") as f64, row.count("vocab") as f64);
            let layers =
                (row.count("size_B") as f64 * 1e9 - vocab * width) / (12.0 * width * width);
            let stages = row.count("pp");
            (layers / stages as f64).round() as usize * stages
        },
        |layers| layers as usize,
    )
}

fn parsed(row: &Cells) -> Row {
    let [gpus, tp, pp, mbs] = ["gpus", "tp", "pp", "mbs"].map(|name| row.count(name));
    // Replicas follow from the ranks, even if another number is printed.
    let dp = gpus / tp / pp;
    let gbs = if row.text("note").contains("use 512") { 512 } else { row.count("gbs") };
    let model = Gpt {
        dim: row.count("hidden"),
        heads: row.count("heads"),
        layers: layers(row),
        seq: row.count("seq_len"),
        vocab: row.count("vocab"),
        dropout: 0.1,
    };
    let text = format!(
        "{}[train]\nglobal_batch = {gbs}\nmicro_batch = {mbs}\n[layout]\nplacement = \"pipe, data, context, tensor\"\ndata = {dp}\nzero = {}\ntensor = {tp}\npipe = {pp}\n\
         recompute = \"full\"\n[precision]\ncompute = \"bf16\"\n",
        model.model(),
        if dp > 1 { 1 } else { 0 },
    );
    let mut software = Software::megatron_deepspeed();
    if row.text("note").contains("+4B/param") {
        // f32 gradient accumulation in addition to 16-bit gradients.
        software.gradients += 4.0;
    }
    Row {
        name: format!(
            "line {} h{} L{} a{} mbs{mbs} gbs{gbs} tp{tp} dp{dp} pp{pp}",
            row.text("line"),
            model.dim,
            model.layers,
            model.heads
        ),
        group: String::new(),
        plan: plan(&text, gpus),
        cluster: Cluster::built_in("a100-80-jz").unwrap(),
        options: options(software),
        seconds: row.number("sec_per_it"),
        bytes: row.number("mem_gb").map(|gb| gb * 1e9),
        failed: row.text("mem_gb") == "OOM",
    }
}
