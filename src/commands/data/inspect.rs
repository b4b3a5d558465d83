//! `lockstep data inspect`: what is inside a token file, or the built-in language.

use crate::commands::progress;
use anyhow::bail;
use lockstep_data::{GRAMMAR, Options, SampleId, Source, Split, TokenFile};
use lockstep_events::thousands;
use std::path::Path;
use std::process::ExitCode;

/// Show what is inside a token file; with --check, compare all of it with its checksums.
///
/// `builtin:grammar` shows the built-in language: some of its sentences, and the lowest loss that a
/// model can reach on it.
#[derive(clap::Args)]
pub struct Args {
    /// A token file, or builtin:grammar
    file: String,
    /// Read everything and compare it with the checksums
    #[arg(long)]
    check: bool,
    /// Print this document, from 0
    #[arg(long)]
    document: Option<u64>,
    /// Tokens per sample, for the lowest loss on the built-in language
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    seq: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.file.as_str() {
        GRAMMAR => show_grammar(&args)?,
        path => show_file(&TokenFile::open(Path::new(path))?, &args)?,
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(serde::Serialize)]
struct Inside<'a> {
    path: &'a Path,
    documents: u64,
    tokens: u64,
    /// Tokens of the shortest, the mean and the longest document.
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
        let bar = progress::bytes("check", Some(file.tokens() * file.width().bytes() as u64));
        let checked = file.check(|bytes| bar.inc(bytes));
        bar.finish_and_clear();
        checked?;
    }
    let inside = Inside {
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
        text: args.document.map(|document| text_of(file, document)).transpose()?,
    };
    if args.json {
        println!("{}", serde_json::to_string(&inside)?);
    } else {
        print(&inside);
    }
    Ok(())
}

fn text_of(file: &TokenFile, document: u64) -> anyhow::Result<String> {
    if document >= file.documents() {
        bail!("there is no document {document}; the last one is {}", file.documents() - 1);
    }
    let mut tokens = vec![0; file.len_of(document) as usize];
    file.read(document, 0, &mut tokens).map_err(lockstep_data::Error::from)?;
    Ok(file.tokenizer()?.decode(&tokens)?)
}

fn print(inside: &Inside) {
    if let Some(text) = &inside.text {
        println!("{text}");
        return;
    }
    println!("{}", inside.path.display());
    println!("  documents  {}", thousands(inside.documents as f64));
    println!(
        "  tokens     {}, {} bytes each",
        thousands(inside.tokens as f64),
        inside.bytes_per_token
    );
    println!(
        "  a document has {} to {} tokens, {:.1} on average",
        thousands(inside.shortest as f64),
        thousands(inside.longest as f64),
        inside.mean
    );
    println!("  vocabulary {}, end token {}", thousands(inside.vocab as f64), inside.end);
    println!("  tokenizer  {}", inside.tokenizer);
    println!("  digest     {}", &inside.digest[..16]);
    match inside.checked {
        true => println!("  checksums  of header, index, tokenizer and tokens are right"),
        false => println!(
            "  checksums  of header, index and tokenizer are right; --check reads the tokens"
        ),
    }
}

fn show_grammar(args: &Args) -> anyhow::Result<()> {
    let source = Source::open(GRAMMAR, &Options::default())?;
    let grammar = source.grammar().expect("it was opened by its name");
    let seq = args.seq as usize;
    let mut tokens = vec![0; 400];
    source.sample(
        SampleId { split: Split::Train, seed: 0, step: 0, global_batch: 1, index: 0 },
        &mut tokens,
    );
    let text = source.decode(&tokens)?;
    let sentences = text.rsplit_once('\n').map_or(text.as_str(), |(whole, _)| whole);
    let floor = grammar.entropy(seq);
    if args.json {
        let record = serde_json::json!({
            "vocab": source.vocab(), "seq": seq, "floor": floor, "rate": grammar.rate(),
            "identity": source.identity(), "text": sentences,
        });
        println!("{record}");
    } else {
        println!("{sentences}\n");
        println!("  vocabulary {}: bytes", source.vocab());
        println!("  the lowest mean loss on samples of {seq} tokens is {floor:.4} nats per token");
        println!("  and {:.4} on endless text", grammar.rate());
    }
    Ok(())
}
