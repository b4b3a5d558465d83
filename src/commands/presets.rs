//! `lockstep presets`: lists the named models.

use std::process::ExitCode;

use anyhow::bail;
use lockstep_plan::config::nearest;
use lockstep_plan::model::Shape;
use lockstep_plan::presets;
use serde_json::json;

/// List the named models and their sizes
///
/// Use one with `preset = "NAME"` in the section `[model]` of a run file, with `lockstep init NAME`, or with `lockstep
/// plan --preset NAME`.
#[derive(clap::Args)]
pub struct Args {
    /// Print one JSON object per preset
    #[arg(long)]
    json: bool,
}

/// Vocabulary of presets without their own: that of bytes. A run uses the vocabulary of its data.
const VOCAB: usize = 257;

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if !args.json {
        println!(
            "{:<17} {:<6} {:>10} {:>6} {:>6} {:>6} {:>7} {:>7} {:>9}",
            "preset", "family", "parameters", "layers", "dim", "heads", "seq", "vocab", "experts"
        );
    }
    for name in presets::NAMES {
        let shape = shape(name)?;
        let params = shape.param_count();
        let Shape { layers, dim, heads, seq, vocab, .. } = shape;
        if args.json {
            println!("{}", json!({"preset": name, "params": params, "shape": shape}));
            continue;
        }
        let family = shape.family.name();
        let experts =
            shape.moe.map_or("-".into(), |moe| format!("{} of {}", moe.top_k, moe.experts));
        println!(
            "{name:<17} {family:<6} {:>10} {layers:>6} {dim:>6} {heads:>6} {seq:>7} {vocab:>7} {experts:>9}",
            count(params)
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// The model of a preset, with the vocabulary of bytes if the preset has none.
pub fn shape(name: &str) -> anyhow::Result<Shape> {
    if !presets::NAMES.contains(&name) {
        let meant = nearest(name, presets::NAMES.into_iter());
        let meant = meant.map_or(String::new(), |near| format!("did you mean `{near}`? "));
        bail!("unknown preset `{name}`; {meant}presets: {}", presets::NAMES.join(", "));
    }
    let shape = presets::shape(name, None).or_else(|_| presets::shape(name, Some(VOCAB)));
    shape.map_err(|_| anyhow::anyhow!("preset {name} is incomplete"))
}

/// A number of parameters: `124M`, `8.03B`.
pub fn count(params: usize) -> String {
    let params = params as f64;
    let (scaled, unit) = match params {
        p if p >= 999.5e6 => (p / 1e9, "B"),
        p if p >= 999.5e3 => (p / 1e6, "M"),
        p => (p / 1e3, "k"),
    };
    let digits = if scaled < 9.995 { 2 } else { usize::from(scaled < 99.95) };
    format!("{scaled:.digits$}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_three_digits() {
        for (params, text) in
            [(8_123, "8.12k"), (999_600, "1.00M"), (124_439_808, "124M"), (70_553_706_496, "70.6B")]
        {
            assert_eq!(count(params), text);
        }
    }
}
