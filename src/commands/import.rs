//! `lockstep import`: converts a Hugging Face checkpoint to the first checkpoint of a run.

use super::progress::{Quiet, WithProgress};
use anyhow::Context;
use lockstep_ckpt::{hf, save};
use lockstep_data::TOKENIZER_FILES;
use lockstep_events::thousands;
use lockstep_plan::model::Shape;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Import a Hugging Face checkpoint (GPT-2, Llama or Mixtral) as a run
///
/// Reads config.json and safetensors files in f32, f16 or bf16. Writes the weights in f32 to
/// RUN/checkpoints/step-00000000, copies the tokenizer, and prints a run file to start with.
#[derive(clap::Args)]
pub struct Args {
    /// Folder with config.json and model.safetensors
    folder: PathBuf,
    /// Run folder to write
    #[arg(long, value_name = "RUN")]
    out: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    quiet: Quiet,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let model = hf::Source::open(&args.folder)?;
    let shape = model.shape();
    let checkpoint = save(&args.out, shape, &WithProgress::new(args.quiet, "import", &model))?;
    copy_tokenizer(&args.folder, &args.out)?;
    let params = shape.param_count();
    let run_file = starter(shape, &args.folder);
    if args.json {
        println!(
            "{}",
            serde_json::json!({"checkpoint": checkpoint, "params": params, "shape": shape, "run_file": run_file})
        );
    } else {
        let out = args.out.display();
        println!("imported {params} parameters to {}", checkpoint.display());
        println!(
            "to train them, save this as tuned.toml and run `lockstep train tuned.toml --from {out}`:\n"
        );
        print!("{run_file}");
    }
    Ok(ExitCode::SUCCESS)
}

fn copy_tokenizer(from: &Path, run: &Path) -> anyhow::Result<()> {
    for name in TOKENIZER_FILES {
        let file = from.join(name);
        if file.is_file() {
            std::fs::copy(&file, run.join(name))
                .with_context(|| format!("cannot copy {}", file.display()))?;
        }
    }
    Ok(())
}

/// Longest samples of the starter run file: a model's longest sequence may not fit in memory.
const STARTER_SEQ: usize = 2048;

/// A run file that trains an imported model.
fn starter(shape: &Shape, folder: &Path) -> String {
    let Shape { layers, dim, vocab, seq, .. } = shape;
    let family = shape.family.name();
    let (used, longest) = (STARTER_SEQ.min(*seq), thousands(*seq as f64));
    format!(
        "name = \"tuned\"
# The model is that of the checkpoint: {family}, {layers} layers of {dim}, vocabulary {vocab}.
# Keys in [model] override it, for example dropout.
[data]
source = \"tuned.tokens\"          # lockstep data prepare TEXT --tokenizer {} --out tuned.tokens
seq = {used:<27}# tokens per sample, at most {longest}; shorter samples need less memory and time
[train]
steps = 1000
global_batch = 32
micro_batch = 1
lr = 2e-5
[layout]
recompute = \"selective\"
[precision]
compute = \"bf16\"
[checkpoint]
every = 100
",
        folder.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_plan::config::Model;
    use lockstep_plan::{Config, Environment, Plan, presets};

    #[test]
    fn starter_run_file_trains_the_imported_model() {
        for preset in ["gpt2-124m", "llama3-8b", "mixtral-8x7b"] {
            let shape = presets::shape(preset, None).unwrap();
            let mut config = Config::parse(&starter(&shape, Path::new("model")), &[]);
            config.base = Model::of(&shape);
            let plan = Plan::resolve(&config, &Environment::one_host(1, 1)).unwrap();
            assert_eq!(plan.model, shape);
            assert_eq!(plan.data.seq, shape.seq.min(STARTER_SEQ));
        }
    }
}
