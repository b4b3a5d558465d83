//! `lockstep data prepare`: what was typed, turned into a recipe, and what came of it.

use crate::commands::progress;
use lockstep_comm::human_bytes;
use lockstep_data::{Format, Recipe, Report, Tokenizer, input_bytes, prepare};
use lockstep_events::thousands;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Make token files from text, jsonl or parquet.
///
/// Rows of jsonl and parquet are documents. A text file is cut into documents where --split-on says, or
/// else at a blank line every 64 KiB. Documents are what is shuffled and held out, and in training an
/// end token stands between them.
///
/// Rows that cannot be used are left out, counted and told. The output is the same whatever the number
/// of threads, and gets its name only when it is whole.
#[derive(clap::Args)]
pub struct Args {
    /// Files, folders (.txt .md .jsonl .json .parquet in them), or - for standard input
    #[arg(required = true)]
    inputs: Vec<PathBuf>,
    /// The token file; or a folder (there already, or ending in /) for one token file per input
    #[arg(long, short)]
    out: PathBuf,
    /// What the inputs are [default: by their names]
    #[arg(long)]
    format: Option<Kind>,
    /// The field of a jsonl row, or the column of a parquet file, with the text
    #[arg(long, default_value = "text")]
    field: String,
    /// bytes (vocabulary 257), or a Hugging Face tokenizer.json, or the folder it lies in
    #[arg(long, default_value = "bytes")]
    tokenizer: String,
    /// The token between documents, as <|endoftext|> [default: the usual one of the tokenizer]
    #[arg(long)]
    end: Option<String>,
    /// In text: a document ends where this stands; \n is a line end
    #[arg(long)]
    split_on: Option<String>,
    /// In text: bytes after which a document ends at the next blank line, as 64K; 0 is never
    #[arg(long, default_value = "64K", value_parser = size, conflicts_with = "split_on")]
    cut: usize,
    /// Bad rows that are left out before it is given up
    #[arg(long, default_value_t = 100)]
    max_bad: u64,
    /// Threads that encode [default: one per core]
    #[arg(long)]
    threads: Option<usize>,
    /// Replace files that exist
    #[arg(long)]
    force: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Kind {
    Text,
    Jsonl,
    Parquet,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let json = args.json;
    let recipe = recipe(args)?;
    let bar = progress::bytes("prepare", input_bytes(&recipe)?);
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
        format: args.format.map(|kind| match kind {
            Kind::Text => Format::Text,
            Kind::Jsonl => Format::Jsonl,
            Kind::Parquet => Format::Parquet,
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
    for made in &report.files {
        println!(
            "{}: {} tokens in {} documents",
            made.path.display(),
            thousands(made.tokens as f64),
            thousands(made.documents as f64)
        );
    }
    let rate = (report.text_bytes as f64 / seconds) as u64;
    println!("{} of text, {}/s", human_bytes(report.text_bytes), human_bytes(rate));
    if report.empty > 0 {
        println!("{} rows without text were left out", thousands(report.empty as f64));
    }
    if report.bad > 0 {
        println!("{} bad rows were left out; the first:", thousands(report.bad as f64));
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
    // Larger documents are cut for the sake of memory, whatever is asked for.
    number.filter(|n| *n <= 32 << 20).ok_or_else(|| "write 4096, 64K, or at most 32M".to_string())
}
