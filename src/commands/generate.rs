//! `lockstep generate`: text from a checkpoint.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail};
use lockstep_data::{Options, Source};
use lockstep_kernels::{Device, Dtype};
use lockstep_model::{Model, Sampling};
use lockstep_plan::Plan;
use lockstep_trainer::{Generator, Prompt, dtype, generate, load_whole};

/// Sample text from a trained model
#[derive(clap::Args)]
pub struct Args {
    /// A run folder (its newest checkpoint) or one checkpoint
    run: PathBuf,
    /// What the text begins with
    #[arg(long, default_value = "")]
    prompt: String,
    /// Tokens to make at most
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// Below 1 likelier, above 1 wilder; 0 always takes the likeliest
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f32,
    /// Draw only from this many of the likeliest
    #[arg(long)]
    top_k: Option<usize>,
    /// Draw only from the likeliest that together reach this probability
    #[arg(long)]
    top_p: Option<f32>,
    /// The same seed gives the same text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The data whose tokenizer to use [default: what the model was trained on]
    #[arg(long)]
    data: Option<String>,
    #[arg(long, default_value_t = default_threads())]
    threads: usize,
    /// One JSON object instead of the text
    #[arg(long)]
    json: bool,
}

fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.temperature < 0.0 || !args.temperature.is_finite() {
        bail!("--temperature {}: 0 or more", args.temperature);
    }
    if args.top_p.is_some_and(|p| !(p > 0.0 && p <= 1.0)) {
        bail!("--top-p {}: more than 0 and at most 1", args.top_p.unwrap_or_default());
    }
    if args.top_k == Some(0) || args.threads == 0 {
        bail!("--top-k and --threads are 1 at least");
    }
    let checkpoint = lockstep_ckpt::load(&lockstep_ckpt::find(&args.run)?)?;
    let head = checkpoint.head();
    let plan: Option<Plan> = serde_json::from_value(head.plan.clone()).ok();
    let spec = match (&args.data, &plan) {
        (Some(spec), _) => spec.clone(),
        (None, Some(plan)) => plan.data.source.clone().into(),
        (None, None) => {
            bail!("{} does not say what it was trained on; name it with --data", args.run.display())
        }
    };
    // Nothing is trained here, so nothing needs to be held out.
    let source = Source::open(&spec, &Options { held_out: 0.0 })
        .context("opening the data for its tokenizer")?;

    let device = Device::cpu(args.threads);
    let dtype = plan.as_ref().map_or(Dtype::F32, dtype);
    let model = Model::whole(&head.shape);
    let weights = load_whole(&device, &head.shape, dtype, &checkpoint.params())?;
    let sampling = Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p };
    let wanted = Prompt { prompt: &args.prompt, tokens: args.tokens, sampling, seed: args.seed };

    let mut text = String::new();
    let begun = Instant::now();
    if !args.json {
        print!("{}", args.prompt);
    }
    let (device, model, weights, source) = (&device, &model, &weights, &source);
    generate(Generator { device, model, weights, dtype, source }, &wanted, |piece| {
        text.push_str(piece);
        if !args.json {
            print!("{piece}");
            let _ = std::io::stdout().flush();
        }
    })?;
    if args.json {
        let seconds = begun.elapsed().as_secs_f64();
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
