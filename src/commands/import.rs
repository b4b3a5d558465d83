//! `lockstep import`: a Hugging Face folder becomes the first checkpoint of a run.

use super::progress::Progress;
use lockstep_ckpt::{Head, hf, save};
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
    let head = Head { step: 0, shape: model.shape().clone(), plan: serde_json::Value::Null };
    let progress = Progress::new("import", &model);
    let checkpoint = save(&args.out, &head, &progress, None)?;
    if args.json {
        let (params, shape) = (progress.total(), &head.shape);
        println!(
            "{}",
            serde_json::json!({"checkpoint": checkpoint, "params": params, "shape": shape})
        );
    } else {
        println!("{} parameters in {}", progress.total(), checkpoint.display());
    }
    Ok(ExitCode::SUCCESS)
}
