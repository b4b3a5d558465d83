//! A run for a preset without a run file, with a typical sequence length and batch size.

use lockstep_plan::Config;

use crate::commands::presets;

/// Maximum sequence length. Most of pre-training uses shorter sequences than the model supports.
const SEQ: usize = 8192;

/// The run, and a description of the chosen values.
pub fn run(name: &str, ranks: usize, sets: &[String]) -> anyhow::Result<(Config, String)> {
    let shape = presets::shape(name)?;
    let seq = shape.seq.min(SEQ);
    let batch = batch(shape.param_count(), seq, ranks);
    let text = format!(
        "name = \"{name}\"\n[model]\npreset = \"{name}\"\n[data]\nseq = {seq}\n\
         [train]\nglobal_batch = {batch}\n[precision]\ncompute = \"bf16\"\n"
    );
    let mut config = Config::parse(&text, sets);
    config.name = Some(name.to_string());
    let tokens = config.train.global_batch.unwrap_or(batch) * config.data.seq.unwrap_or(seq);
    let chosen = format!(
        "defaults: global_batch={batch} × seq={seq} = {:.1}M tokens per step, bf16 (override with --set)",
        tokens as f64 / 1e6
    );
    Ok((config, chosen))
}

/// Sequences per step: 0.5M tokens for small models, 4M for large, 16M for the largest, as in their papers. A multiple of
/// the odd part of the number of ranks, so that it can be divided.
fn batch(params: usize, seq: usize, ranks: usize) -> usize {
    let tokens = match params {
        0..2_000_000_000 => 1 << 19,
        2_000_000_000..300_000_000_000 => 1 << 22,
        _ => 1 << 24,
    };
    let sequences = (tokens / seq).max(1);
    let odd = ranks >> ranks.trailing_zeros();
    let step = odd * if sequences >= 128 * odd { 128 } else { 1 };
    (sequences / step).max(1) * step
}
