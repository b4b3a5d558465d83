//! Megatron-LM on A100s: the SC'21 table, and the tables of the paper on sequence parallelism.

use super::{Gpt, Row, options, plan, read};
use lockstep_sim::{Cluster, Software, estimate};

fn gpt(row: &super::Cells) -> Gpt {
    Gpt {
        dim: row.count("hidden"),
        heads: row.count("heads"),
        layers: row.count("layers"),
        seq: row.count("seq_len"),
        vocab: row.count("vocab"),
        dropout: 0.1,
    }
}

/// Table 1 of "Efficient Large-Scale Language Model Training on GPU Clusters". Micro-batches and chunks are not
/// printed, but were chosen for speed: the fastest that fit are used.
pub fn sc21() -> Vec<Row> {
    let rows = read(include_str!("../../measured/megatron_sc21_table1.csv"));
    rows.iter()
        .map(|row| {
            let (gpus, tp, pp, gbs) = (row.count("gpus"), row.count("tp"), row.count("pp"), row.count("gbs"));
            let dp = gpus / tp / pp;
            let model = gpt(row);
            let (cluster, options) = (Cluster::built_in("a100-80").unwrap(), options(Software::megatron_2021()));
            // FLOPs by the paper's formula (2), on which the printed rate is based.
            let (b, s, l, h, v) =
                (gbs as f64, model.seq as f64, model.layers as f64, model.dim as f64, model.vocab as f64);
            let flops = 96.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + v / (16.0 * l * h));
            let seconds = flops / (row.number("tflops_per_gpu_hw").unwrap() * 1e12 * gpus as f64);
            let plans = [1, 2, 4, 8].into_iter().flat_map(|mbs| [1, 2, 3, 4, 5, 6].map(|chunks| (mbs, chunks)));
            let possible = plans.filter(|(mbs, chunks)| {
                let fits = gbs % (dp * mbs) == 0;
                let rounds = *chunks == 1 || (pp > 1 && (gbs / dp / mbs) % pp == 0);
                fits && rounds && model.layers.is_multiple_of(pp * chunks)
            });
            let all = possible.map(|(mbs, chunks)| {
                let kind = if chunks > 1 { "interleaved" } else { "1f1b" };
                let text = format!(
                    "{}[train]\nglobal_batch = {gbs}\nmicro_batch = {mbs}\n[layout]\nplacement = \"pipe, data, context, tensor\"\ndata = {dp}\ntensor = {tp}\n\
                     pipe = {pp}\nschedule = \"{kind}\"\nchunks = {chunks}\nrecompute = \"full\"\n\
                     [precision]\ncompute = \"bf16\"\n",
                    model.model()
                );
                let plan = plan(&text, gpus);
                let predicted = estimate(&plan, &cluster, &options);
                (predicted, plan)
            });
            let fitting = all.filter(|(predicted, _)| predicted.fits);
            let (_, plan) = fitting
                .min_by(|(a, _), (b, _)| a.step_s.total_cmp(&b.step_s))
                .unwrap_or_else(|| panic!("nothing of {} fits", row.text("params_B")));
            Row {
                name: format!("{}B tp{tp} pp{pp} dp{dp}", row.text("params_B")),
                group: String::new(),
                plan,
                cluster: cluster.clone(),
                options: options.clone(),
                seconds: Some(seconds),
                bytes: None,
                failed: false,
            }
        })
        .collect()
}

/// Table 5 of "Reducing Activation Recomputation in Large Transformer Models": full recompute, and sequence
/// parallelism with selective recompute.
pub fn korthikanti() -> Vec<Row> {
    let rows = read(include_str!("../../measured/korthikanti_table5.csv"));
    let both = rows.iter().flat_map(|row| {
        [("iter_s_full_recompute", false), ("iter_s_sp_selective", true)]
            .map(|(column, selective)| (row, column, selective))
    });
    both.filter(|(row, column, _)| row.number(column).is_some())
        .map(|(row, column, selective)| korthikanti_row(row, row.number(column), selective))
        .collect()
}

fn korthikanti_row(row: &super::Cells, seconds: Option<f64>, selective: bool) -> Row {
    let (tp, pp, dp, chunks) =
        (row.count("tp"), row.count("pp"), row.count("dp"), row.count("interleave"));
    let kind = if chunks > 1 { "interleaved" } else { "1f1b" };
    let recompute = if selective { "selective" } else { "full" };
    let text = format!(
        "{}[train]\nglobal_batch = {}\nmicro_batch = {}\n[layout]\nplacement = \"pipe, data, context, tensor\"\ndata = {dp}\ntensor = {tp}\nsequence = {selective}\n\
         pipe = {pp}\nschedule = \"{kind}\"\nchunks = {chunks}\nrecompute = \"{recompute}\"\n\
         [precision]\ncompute = \"bf16\"\n",
        gpt(row).model(),
        row.count("gbs"),
        row.count("mbs"),
    );
    Row {
        name: format!("{} {recompute} dp{dp}", row.text("model")),
        group: String::new(),
        plan: plan(&text, row.count("gpus")),
        cluster: Cluster::built_in("a100-80").unwrap(),
        options: options(Software::megatron_2022()),
        seconds,
        bytes: None,
        failed: false,
    }
}

/// Figure 1 of the same paper: activations without recompute, and with both techniques, in bytes.
pub fn korthikanti_activations() -> Vec<(Row, f64)> {
    let shapes = read(include_str!("../../measured/korthikanti_table5.csv"));
    let rows = read(include_str!("../../measured/korthikanti_fig1_fig7_memory.csv"));
    let mut all = Vec::new();
    for row in &rows {
        let shape = shapes.iter().find(|shape| shape.text("model") == row.text("model")).unwrap();
        let gib = row.number("act_seqsel_GiB_fig1").unwrap();
        all.push((korthikanti_row(shape, None, true), gib * (1u64 << 30) as f64));
    }
    all
}
