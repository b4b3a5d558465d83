//! `lockstep data inspect`: shows the contents of a token file or of the built-in grammar.

use crate::commands::progress::Quiet;
use anyhow::bail;
use lockstep_data::{GRAMMAR, Options, SampleId, Source, Split, TokenFile};
use lockstep_events::thousands;
use std::path::Path;
use std::process::ExitCode;

/// Show the contents of a token file
///
/// For `builtin:grammar`, shows sentences of the built-in grammar and its entropy, the lowest loss that a model can
/// reach.
#[derive(clap::Args)]
pub struct Args {
    /// Token file, or builtin:grammar
    file: String,
    /// Verify the checksums of all tokens
    #[arg(long)]
    check: bool,
    /// Print document N, from 0
    #[arg(long, value_name = "N")]
    document: Option<u64>,
    /// Tokens per sample, for the entropy of the built-in grammar
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    seq: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    quiet: Quiet,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.file.as_str() {
        GRAMMAR => show_grammar(&args)?,
        path => show_file(&TokenFile::open(Path::new(path))?, &args)?,
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(serde::Serialize)]
struct Contents<'a> {
    path: &'a Path,
    documents: u64,
    tokens: u64,
    /// Length of documents in tokens.
    shortest: u64,
    mean: f64,
    longest: u64,
    vocab: u32,
    end: u32,
    bytes_per_token: usize,
    tokenizer: String,
    digest: String,
    checked: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

fn show_file(file: &TokenFile, args: &Args) -> anyhow::Result<()> {
    if args.check {
        let bytes = file.tokens() * file.width().bytes() as u64;
        let bar = args.quiet.bytes("check", Some(bytes));
        let checked = file.check(|bytes| bar.inc(bytes));
        bar.finish_and_clear();
        checked?;
    }
    let contents = Contents {
        path: file.path(),
        documents: file.documents(),
        tokens: file.tokens(),
        shortest: (0..file.documents()).map(|d| file.len_of(d)).min().unwrap_or(0),
        mean: file.tokens() as f64 / file.documents().max(1) as f64,
        longest: (0..file.documents()).map(|d| file.len_of(d)).max().unwrap_or(0),
        vocab: file.vocab(),
        end: file.end(),
        bytes_per_token: file.width().bytes(),
        tokenizer: file.tokenizer_name(),
        digest: file.digest(),
        checked: args.check,
        text: args.document.map(|document| document_text(file, document)).transpose()?,
    };
    if args.json {
        println!("{}", serde_json::to_string(&contents)?);
    } else {
        print(&contents);
    }
    Ok(())
}

fn document_text(file: &TokenFile, document: u64) -> anyhow::Result<String> {
    if document >= file.documents() {
        bail!("document {document} is out of range: the file has {} documents", file.documents());
    }
    let mut tokens = vec![0; file.len_of(document) as usize];
    file.read(document, 0, &mut tokens).map_err(lockstep_data::Error::from)?;
    Ok(file.tokenizer()?.decode(&tokens)?)
}

fn print(contents: &Contents) {
    if let Some(text) = &contents.text {
        println!("{text}");
        return;
    }
    println!("{}", contents.path.display());
    println!("  documents  {}", thousands(contents.documents as f64));
    println!(
        "  tokens     {}, {} bytes each",
        thousands(contents.tokens as f64),
        contents.bytes_per_token
    );
    println!(
        "  {} to {} tokens per document, {:.1} on average",
        thousands(contents.shortest as f64),
        thousands(contents.longest as f64),
        contents.mean
    );
    println!("  vocabulary {}, end token {}", thousands(contents.vocab as f64), contents.end);
    println!("  tokenizer  {}", contents.tokenizer);
    println!("  digest     {}", &contents.digest[..16]);
    match contents.checked {
        true => println!("  checksums  of header, index, tokenizer and tokens are valid"),
        false => println!(
            "  checksums  of header, index and tokenizer are valid; use --check to verify the tokens"
        ),
    }
}

fn show_grammar(args: &Args) -> anyhow::Result<()> {
    let source = Source::open(GRAMMAR, &Options::default())?;
    let grammar = source.grammar().expect("this source is the grammar");
    let seq = args.seq as usize;
    let mut tokens = vec![0; 400];
    source.sample(
        SampleId { split: Split::Train, seed: 0, batch: 0, global_batch: 1, index: 0 },
        &mut tokens,
    );
    let text = source.decode(&tokens)?;
    let sentences = text.rsplit_once('\n').map_or(text.as_str(), |(whole, _)| whole);
    let entropy = grammar.entropy(seq);
    if args.json {
        let record = serde_json::json!({
            "vocab": source.vocab(), "seq": seq, "floor": entropy, "rate": grammar.rate(),
            "identity": source.identity(), "text": sentences,
        });
        println!("{record}");
    } else {
        println!("{sentences}\n");
        println!("  vocabulary {}: bytes", source.vocab());
        println!("  entropy    {entropy:.4} nats per token in samples of {seq} tokens");
        println!("             {:.4} nats per token in infinite text", grammar.rate());
    }
    Ok(())
}
