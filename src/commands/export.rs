//! `lockstep export`: converts a checkpoint to a Hugging Face folder.

use super::progress::{Quiet, WithProgress};
use lockstep_ckpt::safetensors::Dtype;
use lockstep_ckpt::{Checkpoint, find, find_step, hf, load, run_of};
use lockstep_data::{TOKENIZER_FILES, Tokenizer};
use std::path::PathBuf;
use std::process::ExitCode;

/// Export a checkpoint as a Hugging Face folder
///
/// AutoModelForCausalLM.from_pretrained loads the folder, AutoTokenizer.from_pretrained the tokenizer of the run.
#[derive(clap::Args)]
pub struct Args {
    /// Run folder or one of its checkpoints
    checkpoint: PathBuf,
    /// Step of the checkpoint to export [default: the newest]
    #[arg(long)]
    step: Option<u64>,
    /// Folder to create
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// Type of the exported weights
    #[arg(long, default_value = "f32")]
    dtype: ExportDtype,
    /// Maximum size of one safetensors file in bytes; larger models are split
    #[arg(long, default_value_t = hf::Export::default().shard_bytes)]
    shard_bytes: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    quiet: Quiet,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum ExportDtype {
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
        ExportDtype::F32 => Dtype::F32,
        ExportDtype::Bf16 => Dtype::Bf16,
    };
    let (files, end) = tokenizer(&checkpoint);
    let options = hf::Export { dtype, shard_bytes: args.shard_bytes, files, end };
    let (step, shape) = (checkpoint.head().step, &checkpoint.head().shape);
    let params = checkpoint.params();
    hf::export(shape, &WithProgress::new(args.quiet, "export", &params), &args.to, &options)?;
    let (params, to) = (shape.param_count(), &args.to);
    if args.json {
        println!(
            "{}",
            serde_json::json!({"folder": to, "step": step, "params": params, "shape": shape})
        );
    } else {
        println!("exported step {step} ({params} parameters) to {}", to.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// The tokenizer files of the checkpoint's run, and the end-of-document token.
fn tokenizer(checkpoint: &Checkpoint) -> (Vec<PathBuf>, Option<u32>) {
    let Some(run) = run_of(checkpoint.dir()) else { return (Vec::new(), None) };
    let files = TOKENIZER_FILES.iter().map(|name| run.join(name)).filter(|path| path.is_file());
    // A build without the feature `tokenizers` copies the files, but cannot read them.
    let end = Tokenizer::load(&run).ok().flatten().and_then(|tokenizer| tokenizer.end());
    (files.collect(), end)
}
