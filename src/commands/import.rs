//! `lockstep import`: a Hugging Face folder becomes the first checkpoint of a run.

use super::progress::Watched;
use lockstep_ckpt::{Carried, Head, hf, save};
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
    let (shape, plan) = (model.shape().clone(), serde_json::Value::Null);
    let head = Head { step: 0, shape, plan, carried: Carried::default() };
    let checkpoint = save(&args.out, &head, &Watched::new("import", &model), None)?;
    let (params, shape) = (head.shape.param_count(), &head.shape);
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
