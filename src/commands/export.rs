//! `lockstep export`: a checkpoint becomes a Hugging Face folder.

use super::progress::Watched;
use lockstep_ckpt::safetensors::Dtype;
use lockstep_ckpt::{find, find_step, hf, load};
use std::path::PathBuf;
use std::process::ExitCode;

/// Make a Hugging Face folder of a run's newest checkpoint, of a step, or of the checkpoint that is named
///
/// transformers loads it with AutoModelForCausalLM. A tokenizer is not written; copy its files beside.
#[derive(clap::Args)]
pub struct Args {
    /// A run folder, or one of its checkpoints
    checkpoint: PathBuf,
    /// The step whose checkpoint to take [default: the newest]
    #[arg(long)]
    step: Option<u64>,
    /// The folder to make
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// How weights are stored
    #[arg(long, default_value = "f32")]
    dtype: Stored,
    /// Bytes above which the weights are spread over several files
    #[arg(long, default_value_t = hf::Export::default().shard_bytes)]
    shard_bytes: usize,
    /// One JSON object instead of a sentence
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Stored {
    F32,
    Bf16,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let dir = match args.step {
        Some(step) => find_step(&args.checkpoint, step)?,
        None => find(&args.checkpoint)?,
    };
    let checkpoint = load(&dir)?;
    let dtype = match args.dtype {
        Stored::F32 => Dtype::F32,
        Stored::Bf16 => Dtype::Bf16,
    };
    let how = hf::Export { dtype, shard_bytes: args.shard_bytes };
    let (step, shape) = (checkpoint.head().step, &checkpoint.head().shape);
    hf::export(shape, &Watched::new("export", &checkpoint.params()), &args.to, how)?;
    let (params, to) = (shape.param_count(), &args.to);
    if args.json {
        println!(
            "{}",
            serde_json::json!({"folder": to, "step": step, "params": params, "shape": shape})
        );
    } else {
        println!("step {step}, {params} parameters in {}", to.display());
    }
    Ok(ExitCode::SUCCESS)
}
