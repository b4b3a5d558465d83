//! `lockstep import`: converts a Hugging Face checkpoint to the first checkpoint of a run.

use super::progress::WithProgress;
use lockstep_ckpt::{hf, save};
use std::path::PathBuf;
use std::process::ExitCode;

/// Import a Hugging Face checkpoint (GPT-2, Llama or Mixtral) as a run
///
/// Reads config.json and safetensors files in f32, f16 or bf16. Writes the weights in f32 to
/// RUN/checkpoints/step-00000000. Tokenizer files are not copied.
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
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let model = hf::Source::open(&args.folder)?;
    let shape = model.shape();
    let checkpoint = save(&args.out, shape, &WithProgress::new("import", &model))?;
    let params = shape.param_count();
    if args.json {
        println!(
            "{}",
            serde_json::json!({"checkpoint": checkpoint, "params": params, "shape": shape})
        );
    } else {
        println!("imported {params} parameters to {}", checkpoint.display());
    }
    Ok(ExitCode::SUCCESS)
}
