//! `lockstep data prepare`: converts text to token files.

use crate::commands::progress::Quiet;
use lockstep_comm::human_bytes;
use lockstep_data::{Format, Recipe, Report, Tokenizer, input_bytes, prepare};
use lockstep_events::thousands;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Convert text, jsonl or parquet files to token files
///
/// Each row of a jsonl or parquet file is a document. A text file is split into documents at --split-on or, by
/// default, at the first blank line after every 64 KiB. Training shuffles and holds out whole documents, and separates
/// them with an end token.
///
/// Invalid rows are skipped, counted and reported. The output does not depend on the number of threads. It appears
/// under its name only when it is complete.
#[derive(clap::Args)]
pub struct Args {
    /// Files, folders (uses their .txt, .md, .jsonl, .json and .parquet files), or - for standard input
    #[arg(required = true)]
    inputs: Vec<PathBuf>,
    /// Token file to write; an existing folder or a path ending in / gets one token file per input
    #[arg(long, short)]
    out: PathBuf,
    /// Format of the inputs [default: from the file names]
    #[arg(long)]
    format: Option<InputFormat>,
    /// Field of a jsonl row or column of a parquet file that contains the text
    #[arg(long, default_value = "text")]
    field: String,
    /// Tokenizer: bytes (vocabulary of 257), a Hugging Face tokenizer.json, or the folder that contains it
    #[arg(long, default_value = "bytes")]
    tokenizer: String,
    /// Token between documents, e.g. <|endoftext|> [default: the tokenizer's end token]
    #[arg(long)]
    end: Option<String>,
    /// Text that separates documents in text files; \n is a newline [default: see --cut]
    #[arg(long)]
    split_on: Option<String>,
    /// Size after which a document in a text file ends at the next blank line, e.g. 64K; 0 disables splitting
    #[arg(long, default_value = "64K", value_parser = size, conflicts_with = "split_on")]
    cut: usize,
    /// Maximum number of invalid rows to skip before failing
    #[arg(long, default_value_t = 100)]
    max_bad: u64,
    /// Number of threads [default: one per core]
    #[arg(long)]
    threads: Option<usize>,
    /// Overwrite existing files
    #[arg(long)]
    force: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    quiet: Quiet,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum InputFormat {
    Text,
    Jsonl,
    Parquet,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let (json, quiet) = (args.json, args.quiet);
    let recipe = recipe(args)?;
    let bar = quiet.bytes("prepare", input_bytes(&recipe)?);
    let start = Instant::now();
    let report = prepare(&recipe, &|bytes| bar.inc(bytes));
    bar.finish_and_clear();
    let report = report?;
    if json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        show(&report, start.elapsed().as_secs_f64());
    }
    Ok(ExitCode::SUCCESS)
}

fn recipe(args: Args) -> anyhow::Result<Recipe> {
    let tokenizer = Tokenizer::open(&args.tokenizer, args.end.as_deref())?;
    let mut recipe = Recipe {
        format: args.format.map(|format| match format {
            InputFormat::Text => Format::Text,
            InputFormat::Jsonl => Format::Jsonl,
            InputFormat::Parquet => Format::Parquet,
        }),
        field: args.field,
        tokenizer,
        split_on: args.split_on.map(|text| text.replace("\\n", "\n")),
        cut: args.cut,
        max_bad: args.max_bad,
        replace: args.force,
        ..Recipe::new(args.inputs, args.out)
    };
    if let Some(threads) = args.threads {
        recipe.threads = threads;
    }
    Ok(recipe)
}

fn show(report: &Report, seconds: f64) {
    for file in &report.files {
        println!(
            "{}: {} tokens in {} documents",
            file.path.display(),
            thousands(file.tokens as f64),
            thousands(file.documents as f64)
        );
    }
    let rate = (report.text_bytes as f64 / seconds) as u64;
    println!("{} of text, {}/s", human_bytes(report.text_bytes), human_bytes(rate));
    if report.empty > 0 {
        println!("skipped {} rows without text", thousands(report.empty as f64));
    }
    if report.bad > 0 {
        println!("skipped {} invalid rows; the first:", thousands(report.bad as f64));
        report.first_bad.iter().for_each(|row| println!("  {row}"));
    }
}

/// `64K` → 65536.
fn size(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.strip_suffix(['K', 'k']) {
        Some(digits) => (digits, 1 << 10),
        None => text.strip_suffix('M').map_or((text, 1), |digits| (digits, 1 << 20)),
    };
    let number = digits.parse::<usize>().ok().and_then(|number| number.checked_mul(unit));
    // Documents above 32 MiB are always split, to bound the memory use.
    number
        .filter(|n| *n <= 32 << 20)
        .ok_or_else(|| "use a size of at most 32M, e.g. 4096 or 64K".to_string())
}
