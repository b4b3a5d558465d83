//! A run for a named model that nobody has written a run file for: sequence and batch as such models are trained with.

use anyhow::bail;
use lockstep_plan::config::nearest;
use lockstep_plan::{Config, presets};

/// Sequences are cut to this length where the model would take longer ones, as most of a training does.
const SEQ: usize = 8192;

/// The run, and a sentence on what was chosen.
pub fn run(name: &str, ranks: usize, sets: &[String]) -> anyhow::Result<(Config, String)> {
    if !presets::NAMES.contains(&name) {
        let meant = nearest(name, presets::NAMES.into_iter());
        let meant = meant.map_or(String::new(), |near| format!("did you mean `{near}`? "));
        bail!("no preset is called `{name}`: {meant}there are {}", presets::NAMES.join(", "));
    }
    // The data's vocabulary only serves models that have none of their own.
    let shape =
        presets::shape(name, Some(512)).map_err(|_| anyhow::anyhow!("{name} is no whole model"))?;
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
        "chosen, as nothing was said: global_batch={batch} × seq={seq} = {:.1}M tokens per step, bf16 (--set changes them)",
        tokens as f64 / 1e6
    );
    Ok((config, chosen))
}

/// Sequences of a step: half a million tokens for small models, four for large, sixteen for the largest, as their papers
/// have it; a multiple of what in the number of ranks is no power of two, so that it can be cut.
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
