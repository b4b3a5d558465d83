//! `lockstep generate`: samples text from a checkpoint.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail};
use lockstep_ckpt::{Checkpoint, run_of};
use lockstep_data::{Options, Source, Tokenizer};
use lockstep_kernels::Dtype;
use lockstep_model::{Model, Sampling};
use lockstep_plan::Plan;
use lockstep_trainer::{Generator, Prompt, dtype, generate, load_whole};

use crate::commands::device;
use crate::commands::progress::{Quiet, WithProgress};

/// Sample text from a trained model
#[derive(clap::Args)]
pub struct Args {
    /// Run folder (uses its newest checkpoint) or checkpoint
    run: PathBuf,
    /// Text to continue
    #[arg(long, default_value = "")]
    prompt: String,
    /// Maximum number of tokens to generate
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// Sampling temperature; 0 always picks the most likely token
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f32,
    /// Sample from the K most likely tokens only [default: all]
    #[arg(long)]
    top_k: Option<usize>,
    /// Sample from the most likely tokens with a total probability of P only [default: all]
    #[arg(long)]
    top_p: Option<f32>,
    /// Seed of the sampler; the same seed gives the same text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Data whose tokenizer to use [default: the tokenizer in the run folder]
    #[arg(long)]
    data: Option<String>,
    /// Number of threads [default: one per core]
    #[arg(long, default_value_t = default_threads(), hide_default_value = true)]
    threads: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    quiet: Quiet,
}

fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.temperature < 0.0 || !args.temperature.is_finite() {
        bail!("--temperature must be at least 0 (got {})", args.temperature);
    }
    if let Some(p) = args.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
        bail!("--top-p must be greater than 0 and at most 1 (got {p})");
    }
    if args.top_k == Some(0) {
        bail!("--top-k must be at least 1 (got 0)");
    }
    if args.threads == 0 {
        bail!("--threads must be at least 1 (got 0)");
    }
    let checkpoint = lockstep_ckpt::load(&lockstep_ckpt::find(&args.run)?)?;
    let head = checkpoint.head();
    let plan: Option<Plan> = serde_json::from_value(head.plan.clone()).ok();
    let tokenizer = tokenizer(&args, &checkpoint, plan.as_ref())?;

    let device = device::open_alone(args.threads)?;
    let dtype = plan.as_ref().map_or(Dtype::F32, dtype);
    let model = Model::whole(&head.shape);
    let params = checkpoint.params();
    let params = WithProgress::new(args.quiet, "load", &params);
    let weights = load_whole(&device, &head.shape, dtype, &params)?;
    drop(params);
    let sampling = Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p };
    let prompt = Prompt { prompt: &args.prompt, tokens: args.tokens, sampling, seed: args.seed };

    let mut text = String::new();
    let start = Instant::now();
    if !args.json {
        print!("{}", args.prompt);
    }
    let (device, model, weights, tokenizer) = (&device, &model, &weights, &tokenizer);
    generate(Generator { device, model, weights, dtype, tokenizer }, &prompt, |piece| {
        text.push_str(piece);
        if !args.json {
            print!("{piece}");
            let _ = std::io::stdout().flush();
        }
    })?;
    if args.json {
        let seconds = start.elapsed().as_secs_f64();
        let (prompt, step) = (&args.prompt, head.step);
        println!(
            "{}",
            serde_json::json!({"prompt": prompt, "text": text, "step": step, "seconds": seconds})
        );
    } else {
        println!();
    }
    Ok(ExitCode::SUCCESS)
}

/// The tokenizer of --data, of the run's folder, or of the training data, for runs of older versions.
fn tokenizer(
    args: &Args,
    checkpoint: &Checkpoint,
    plan: Option<&Plan>,
) -> anyhow::Result<Tokenizer> {
    let of_data = |spec: &str| {
        // Only the tokenizer is used, so no documents are held out.
        let source = Source::open(spec, &Options { held_out: 0.0 })?;
        source.into_tokenizer()
    };
    if let Some(spec) = &args.data {
        return of_data(spec).context("opening the data for its tokenizer");
    }
    let run = run_of(checkpoint.dir()).unwrap_or_else(|| args.run.clone());
    if let Some(found) = Tokenizer::load(&run)? {
        return Ok(found);
    }
    let Some(plan) = plan else {
        bail!("{} has no tokenizer.json; choose a tokenizer with --data", run.display())
    };
    let spec = String::from(plan.data.source.clone());
    of_data(&spec).with_context(|| {
        format!("{} has no tokenizer.json; choose a tokenizer with --data", run.display())
    })
}
