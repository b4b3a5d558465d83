//! `lockstep init`: writes a commented run file to start from.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use lockstep_plan::model::Shape;

use crate::commands::presets;
use crate::print::print_line;

/// Write a commented run file to start from
///
/// The small presets train on the built-in grammar and need no data. For the others, prepare a token file first; the run
/// file says how.
#[derive(clap::Args)]
pub struct Args {
    /// Model of the run; `lockstep presets` lists all
    #[arg(default_value = "grammar")]
    preset: String,
    /// File to write, or - for standard output [default: PRESET.toml]
    #[arg(long, short)]
    out: Option<PathBuf>,
    /// Overwrite an existing file
    #[arg(long)]
    force: bool,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let text = starter(&args.preset, &presets::shape(&args.preset)?);
    let path = args.out.unwrap_or_else(|| format!("{}.toml", args.preset).into());
    if path == Path::new("-") {
        print!("{text}");
        return Ok(ExitCode::SUCCESS);
    }
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).create_new(!args.force);
    let shown = path.display();
    match options.open(&path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            bail!("{shown} exists; choose another file with --out, or overwrite it with --force")
        }
        opened => opened
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .with_context(|| format!("cannot write {shown}"))?,
    }
    print_line!("wrote {shown}; start it with `lockstep train {shown}`");
    Ok(ExitCode::SUCCESS)
}

/// Parameters up to which a model learns the built-in grammar in minutes.
const SMALL: usize = 2_000_000;
/// Vocabulary of the tokenizer `bytes`.
const BYTES: usize = 257;
/// Longest samples of a starter: a model's longest sequence may not fit in memory.
const SEQ: usize = 2048;

/// A run file for a preset.
fn starter(preset: &str, shape: &Shape) -> String {
    let (params, seq) = (shape.param_count(), shape.seq.min(SEQ));
    let size = presets::count(params);
    let family = shape.family.name();
    let is_small = params < SMALL;
    let (source, data) = match is_small {
        true => ("builtin:grammar".to_string(), "generated, no download".to_string()),
        false => {
            let tokenizer = if shape.vocab > 10_000 { " --tokenizer TOKENIZER.json" } else { "" };
            let name = format!("{preset}.tokens");
            let how = format!("lockstep data prepare TEXT{tokenizer} --out {name}");
            (name, how)
        }
    };
    let vocab = match shape.vocab < BYTES {
        true => format!("vocab = {BYTES:<26}# that of bytes\n"),
        false => String::new(),
    };
    // Larger models need smaller steps (table 2.1 of GPT-3).
    let lr = match params {
        0..SMALL => "3e-3",
        SMALL..1_000_000_000 => "6e-4",
        1_000_000_000..20_000_000_000 => "3e-4",
        _ => "1e-4",
    };
    let micro = if params < 1_000_000_000 { 4 } else { 1 };
    let dtype = if is_small { "f32" } else { "bf16" };
    let Shape { layers, dim, seq: longest, .. } = shape;
    let key = |key: &str, value: String, comment: &str| {
        format!("{:<33} # {comment}\n", format!("{key} = {value}"))
    };
    let text = |value: &str| format!("\"{value}\"");
    let mut file = format!(
        "# Every key has a default, and `--set section.key=value` overrides it.\n\
         #   lockstep train {preset}.toml --dry-run                    # check it and print the plan\n\
         #   lockstep plan {preset}.toml --cluster h100-64 --search    # find a layout for a cluster\n\
         #   lockstep train {preset}.toml\n\
         name = \"{preset}\"\n"
    );
    for (section, lines) in [
        (
            "model",
            vec![
                key(
                    "preset",
                    text(preset),
                    &format!("{family}, {layers} layers of {dim}: {size} parameters"),
                ),
                vocab,
                key("# dropout", "0.1".into(), "fraction of activations set to 0 in training"),
            ],
        ),
        (
            "data",
            vec![
                key("source", text(&source), &data),
                key("seq", seq.to_string(), &format!("tokens per sample, at most {longest}")),
            ],
        ),
        (
            "train",
            vec![
                key("steps", if is_small { "800" } else { "10000" }.into(), "optimizer steps"),
                key(
                    "global_batch",
                    "16".into(),
                    &format!("samples per step of all ranks: {} tokens", 16 * seq),
                ),
                key(
                    "micro_batch",
                    micro.to_string(),
                    "samples of a rank at once; more need more memory",
                ),
                key("lr", lr.into(), "highest learning rate"),
                key("warmup", "40".into(), "steps until the learning rate is reached"),
                key("eval_every", "100".into(), "steps between evaluations; 0 for none"),
                key("log_every", "10".into(), "steps between reports"),
                key("# clip", "1.0".into(), "highest norm of the gradient"),
                key("# seed", "1".into(), "initial weights and order of the samples"),
            ],
        ),
        (
            "layout",
            vec![
                key(
                    "data",
                    "1".into(),
                    "replicas, which share the samples of a step; the product is the number of ranks",
                ),
                key(
                    "# zero",
                    "1".into(),
                    "replicas share optimizer state (1), gradients (2), parameters (3)",
                ),
                key("# tensor", "2".into(), "ranks that split every layer; needs fast links"),
                key("# pipe", "2".into(), "stages of consecutive layers"),
                key(
                    "# recompute",
                    text("full"),
                    "less memory for activations, a third more compute",
                ),
            ],
        ),
        ("precision", vec![key("compute", text(dtype), "f32 or bf16; master weights are f32")]),
        (
            "checkpoint",
            vec![
                key("every", "100".into(), "steps between checkpoints"),
                key("keep", "2".into(), "newest checkpoints that are kept"),
            ],
        ),
    ] {
        file.push_str(&format!("\n[{section}]\n{}", lines.concat()));
    }
    file
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_plan::presets::NAMES;
    use lockstep_plan::{Config, Environment, Plan};

    fn resolve(text: &str, ranks: usize) -> Plan {
        let environment = Environment::one_host(ranks, 1).with_vocab(BYTES);
        Plan::resolve(&Config::parse(text, &[]), &environment).unwrap_or_else(|errors| {
            panic!("{:?} in:\n{text}", errors.iter().map(ToString::to_string).collect::<Vec<_>>())
        })
    }

    #[test]
    fn every_starter_is_valid() {
        for preset in NAMES {
            let shape = presets::shape(preset).unwrap();
            let plan = resolve(&starter(preset, &shape), 1);
            assert_eq!(plan.model.layers, shape.layers);
        }
    }

    #[test]
    fn commented_keys_are_valid() {
        let text = starter("grammar", &presets::shape("grammar").unwrap());
        let lines = text.lines().map(|line| match line.strip_prefix("# ") {
            Some(key) if key.contains(" = ") => key,
            _ => line,
        });
        let plan = resolve(&lines.collect::<Vec<_>>().join("\n"), 4);
        assert_eq!((plan.layout.tensor, plan.layout.pipe, plan.layout.zero), (2, 2, 1));
    }
}
