//! Makes token files from text, jsonl and parquet. Streams, so memory does not grow with the input. The output does
//! not depend on the number of threads.

mod batch;
mod input;
mod json;
mod jsonl;
mod lines;
#[cfg(feature = "parquet")]
mod parquet;
mod pipeline;
mod text;

use crate::error::{BadRow, Error, Result};
use crate::tokenizer::Tokenizer;
use crate::tokens::Writer;
pub use input::Format;
use input::Input;
use std::path::{Path, PathBuf};

/// Number of bad rows that are reported in full.
const REPORTED: usize = 5;

/// Inputs, output and options of `prepare`.
#[derive(Debug)]
pub struct Recipe {
    /// Files, folders, or `-` for standard input.
    pub inputs: Vec<PathBuf>,
    /// A file for all inputs, or a folder (an existing one, or a name that ends in `/`) for one file per input.
    pub out: PathBuf,
    /// Format of the inputs; by default it follows from the file extension.
    pub format: Option<Format>,
    /// Field of a jsonl row or column of a parquet file that contains the text.
    pub field: String,
    pub tokenizer: Tokenizer,
    /// Separator between documents in text files. It is removed, with the line ends around it.
    pub split_on: Option<String>,
    /// Document size for text files without `split_on`: a document ends at the first blank line after this many bytes,
    /// or at the first line end after twice as many. Zero makes each file one document.
    pub cut: usize,
    /// Number of bad rows that are tolerated.
    pub max_bad: u64,
    pub threads: usize,
    /// Whether to overwrite existing files.
    pub replace: bool,
}

impl Recipe {
    pub fn new(inputs: Vec<PathBuf>, out: impl Into<PathBuf>) -> Recipe {
        Recipe {
            inputs,
            out: out.into(),
            format: None,
            field: "text".to_string(),
            tokenizer: Tokenizer::bytes(),
            split_on: None,
            cut: 64 << 10,
            max_bad: 100,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            replace: false,
        }
    }
}

/// Result of `prepare`.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Report {
    pub files: Vec<PreparedFile>,
    /// Text bytes of all documents.
    pub text_bytes: u64,
    /// Empty rows and documents, which were skipped.
    pub empty: u64,
    /// Number of bad rows, and the first few of them.
    pub bad: u64,
    pub first_bad: Vec<BadRow>,
}

/// One token file.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct PreparedFile {
    pub path: PathBuf,
    pub documents: u64,
    pub tokens: u64,
}

/// Makes token files. `progress` is called with the number of input bytes read, possibly from another thread;
/// `input_bytes` returns the total.
///
/// ```
/// use lockstep_data::{Options, Recipe, Source, prepare};
///
/// let folder = std::env::temp_dir().join(format!("lockstep-doc-{}", std::process::id()));
/// std::fs::create_dir_all(&folder)?;
/// let (input, out) = (folder.join("two.jsonl"), folder.join("two.tokens"));
/// std::fs::write(&input, "{\"text\": \"one\"}\n{\"text\": \"two\"}\n")?;
///
/// let report = prepare(&Recipe::new(vec![input], &out), &|_bytes| ())?;
/// assert_eq!((report.files[0].documents, report.files[0].tokens), (2, 6));
/// let source = Source::open(out.to_str().unwrap(), &Options { held_out: 0.0 })?;
/// assert_eq!(source.vocab(), 257);
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn prepare(recipe: &Recipe, progress: &(dyn Fn(u64) + Sync)) -> Result<Report> {
    if recipe.threads == 0 {
        return Err(Error::misuse(
            "--threads must be at least 1 (got 0); the default is one per core",
        ));
    }
    if recipe.split_on.as_deref() == Some("") {
        return Err(Error::misuse("--split-on must not be empty"));
    }
    if recipe.tokenizer.end().is_none() {
        return Err(Error::misuse("the tokenizer has no end-of-document token; use another one"));
    }
    let inputs = input::find(&recipe.inputs, recipe.format)?;
    let mut report = Report::default();
    for (out, inputs) in outputs(recipe, &inputs)? {
        make(recipe, inputs, &out, &mut report, progress)?;
    }
    Ok(report)
}

/// Total size of the inputs; `None` if standard input is one of them.
pub fn input_bytes(recipe: &Recipe) -> Result<Option<u64>> {
    let inputs = input::find(&recipe.inputs, recipe.format)?;
    Ok(inputs.iter().map(|input| input.bytes).sum())
}

fn make(
    recipe: &Recipe,
    inputs: &[Input],
    out: &Path,
    report: &mut Report,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<()> {
    let mut writer = Writer::create(out, &recipe.tokenizer)?;
    pipeline::run(recipe, inputs, progress, |done| {
        for document in &done.documents {
            writer.add(&done.tokens[document.range.clone()], document.hash)?;
        }
        report.take(done.bad, done.empty, done.text_bytes, recipe.max_bad)
    })?;
    let (documents, tokens) = writer.written();
    if documents == 0 {
        let names: Vec<_> = inputs.iter().map(|input| input.path.display().to_string()).collect();
        let why = report.first_bad.first().map_or(String::new(), |row| format!("; {row}"));
        return Err(Error::misuse(format!("no documents in {}{why}", names.join(", "))));
    }
    writer.finish(&recipe.tokenizer)?;
    report.files.push(PreparedFile { path: out.to_path_buf(), documents, tokens });
    Ok(())
}

impl Report {
    fn take(&mut self, bad: Vec<BadRow>, empty: u64, text_bytes: u64, allowed: u64) -> Result<()> {
        self.empty += empty;
        self.text_bytes += text_bytes;
        for row in bad {
            self.bad += 1;
            if self.first_bad.len() < REPORTED {
                self.first_bad.push(row);
            }
            if self.bad > allowed {
                let first = std::mem::take(&mut self.first_bad);
                return Err(Error::BadRows { allowed, found: self.bad, first });
            }
        }
        Ok(())
    }
}

/// The inputs of each output file.
fn outputs<'a>(recipe: &Recipe, inputs: &'a [Input]) -> Result<Vec<(PathBuf, &'a [Input])>> {
    let out = &recipe.out;
    let outputs: Vec<_> = if out.is_dir() || out.to_string_lossy().ends_with('/') {
        std::fs::create_dir_all(out).map_err(Error::system("making", out))?;
        let name = |input: &Input| out.join(input.stem()).with_added_extension("tokens");
        inputs.iter().map(|input| (name(input), std::slice::from_ref(input))).collect()
    } else {
        vec![(out.clone(), inputs)]
    };
    for (i, (path, _)) in outputs.iter().enumerate() {
        if outputs[..i].iter().any(|(other, _)| other == path) {
            let path = path.display();
            return Err(Error::misuse(format!(
                "two inputs would be written to {path}; rename one"
            )));
        }
        if path.exists() && !recipe.replace {
            return Err(Error::file(path, "already exists; use --force to overwrite it"));
        }
    }
    Ok(outputs)
}
