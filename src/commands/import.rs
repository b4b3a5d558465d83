//! `lockstep import`: a Hugging Face folder becomes the first checkpoint of a run.

use super::progress::Watched;
use lockstep_ckpt::{hf, save};
use std::path::PathBuf;
use std::process::ExitCode;

/// Make a run of a Hugging Face folder: GPT-2, Llama or Mixtral, safetensors of f32, f16 or bf16
///
/// Writes RUN/checkpoints/step-00000000 with the weights as f32. Tokenizer files are not copied.
#[derive(clap::Args)]
pub struct Args {
    /// The folder with config.json and model.safetensors
    folder: PathBuf,
    /// The run folder to write into
    #[arg(long, value_name = "RUN")]
    out: PathBuf,
    /// One JSON object instead of a sentence
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let model = hf::Source::open(&args.folder)?;
    let shape = model.shape();
    let checkpoint = save(&args.out, shape, &Watched::new("import", &model))?;
    let params = shape.param_count();
    if args.json {
        println!(
            "{}",
            serde_json::json!({"checkpoint": checkpoint, "params": params, "shape": shape})
        );
    } else {
        println!("{params} parameters in {}", checkpoint.display());
    }
    Ok(ExitCode::SUCCESS)
}
