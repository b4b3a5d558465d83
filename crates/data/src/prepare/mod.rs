//! Making token files from text, jsonl and parquet. Reads and writes as a stream: memory does not grow
//! with the input. The same input gives the same bytes, whatever the number of threads.

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

/// How many bad rows are told in full.
const TOLD: usize = 5;

/// What to make, and from what.
#[derive(Debug)]
pub struct Recipe {
    /// Files, folders, or `-` for standard input.
    pub inputs: Vec<PathBuf>,
    /// A file for all inputs, or a folder (one that exists, or a name that ends in `/`) for a file each.
    pub out: PathBuf,
    /// What the inputs are; without it, their names tell.
    pub format: Option<Format>,
    /// The field of a jsonl row, or the column of a parquet file, that holds the text.
    pub field: String,
    pub tokenizer: Tokenizer,
    /// In text: where a document ends. The text itself is left out, and line ends around it.
    pub split_on: Option<String>,
    /// In text without `split_on`: a document ends at the first blank line after this many bytes, or at
    /// the first line end after twice as many. Zero: never, a file is a document.
    pub cut: usize,
    /// How many rows may be bad before it is given up.
    pub max_bad: u64,
    pub threads: usize,
    /// Whether to replace files that exist.
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

/// What was made.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Report {
    pub files: Vec<Made>,
    /// Bytes of the text of all documents.
    pub text_bytes: u64,
    /// Rows and documents without text, which were left out.
    pub empty: u64,
    /// Rows that could not be used, and the first few of them.
    pub bad: u64,
    pub first_bad: Vec<BadRow>,
}

/// One token file.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Made {
    pub path: PathBuf,
    pub documents: u64,
    pub tokens: u64,
}

/// Makes token files. `progress` is told the bytes of input that were taken in, and may be called from
/// another thread; `size_of` tells how many there will be.
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
        return Err(Error::misuse("--threads 0 does nothing; leave it out for one per core"));
    }
    if recipe.split_on.as_deref() == Some("") {
        return Err(Error::misuse("--split-on needs a text to look for"));
    }
    let inputs = input::find(&recipe.inputs, recipe.format)?;
    let mut report = Report::default();
    for (out, inputs) in outputs(recipe, &inputs)? {
        make(recipe, inputs, &out, &mut report, progress)?;
    }
    Ok(report)
}

/// Bytes of input that a recipe will take in; `None` if standard input is among them.
pub fn size_of(recipe: &Recipe) -> Result<Option<u64>> {
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
            writer.add(&done.tokens[document.range.clone()], document.mark)?;
        }
        report.take(done.bad, done.empty, done.text_bytes, recipe.max_bad)
    })?;
    let (documents, tokens) = writer.written();
    if documents == 0 {
        let names: Vec<_> = inputs.iter().map(|input| input.path.display().to_string()).collect();
        let why = report.first_bad.first().map_or(String::new(), |row| format!("; {row}"));
        return Err(Error::misuse(format!("no document in {}{why}", names.join(", "))));
    }
    writer.finish(&recipe.tokenizer)?;
    report.files.push(Made { path: out.to_path_buf(), documents, tokens });
    Ok(())
}

impl Report {
    fn take(&mut self, bad: Vec<BadRow>, empty: u64, text_bytes: u64, allowed: u64) -> Result<()> {
        self.empty += empty;
        self.text_bytes += text_bytes;
        for row in bad {
            self.bad += 1;
            if self.first_bad.len() < TOLD {
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

/// Which inputs go into which file.
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
            return Err(Error::misuse(format!("two inputs would both become {path}; rename one")));
        }
        if path.exists() && !recipe.replace {
            return Err(Error::file(path, "exists already; --force replaces it"));
        }
    }
    Ok(outputs)
}
