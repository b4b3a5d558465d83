//! Batches of rows for the tokenizer threads, and their encoded form. Batches are small, which keeps all threads busy
//! and memory low.

use super::input::{Format, Input};
use super::json;
use crate::error::{BadRow, Error, Result};
use crate::tokenizer::Tokenizer;
use crate::tokens::Width;
use std::borrow::Cow;
use std::ops::Range;

/// Bytes at which a batch is full.
const BATCH_BYTES: usize = 64 << 10;
/// Maximum length of a row or document: longer rows are rejected, longer documents are split.
pub const MAX_ROW_BYTES: usize = 64 << 20;

/// Rows of one input file.
pub struct Batch<'a> {
    pub input: &'a Input,
    data: Vec<u8>,
    rows: Vec<Row>,
    /// Rows that the reader rejected.
    bad: Vec<BadRow>,
}

struct Row {
    range: Range<usize>,
    line: u64,
}

impl<'a> Batch<'a> {
    pub fn new(input: &'a Input) -> Batch<'a> {
        Batch { input, data: Vec::with_capacity(BATCH_BYTES), rows: Vec::new(), bad: Vec::new() }
    }

    pub fn add(&mut self, line: u64, row: &[u8]) {
        let start = self.data.len();
        self.data.extend_from_slice(row);
        self.rows.push(Row { range: start..self.data.len(), line });
    }

    pub fn add_bad(&mut self, line: u64, reason: impl Into<String>) {
        self.bad.push(BadRow { file: self.input.path.clone(), line, reason: reason.into() });
    }

    pub fn is_full(&self) -> bool {
        self.data.len() >= BATCH_BYTES || self.bad.len() >= 1024
    }
}

/// A batch in the encoding of the token file.
#[derive(Default)]
pub struct Encoded {
    pub tokens: Vec<u8>,
    pub documents: Vec<Document>,
    pub bad: Vec<BadRow>,
    pub empty: u64,
    pub text_bytes: u64,
}

pub struct Document {
    pub range: Range<usize>,
    pub hash: u64,
}

/// Tokenizes a batch.
pub fn encode(batch: Batch, field: &str, tokenizer: &Tokenizer) -> Result<Encoded> {
    let width = Width::of(tokenizer.vocab());
    let mut done = Encoded { bad: batch.bad, ..Encoded::default() };
    for row in &batch.rows {
        let text = match text_of(&batch.data[row.range.clone()], batch.input.format, field) {
            Ok(text) => text,
            Err(reason) => {
                let file = batch.input.path.clone();
                done.bad.push(BadRow { file, line: row.line, reason });
                continue;
            }
        };
        let tokens = tokenizer.encode(&text).map_err(|error| {
            Error::file(&batch.input.path, format!("line {}: {error}", row.line))
        })?;
        if tokens.is_empty() {
            done.empty += 1;
            continue;
        }
        let start = done.tokens.len();
        width.put(&tokens, &mut done.tokens);
        done.documents.push(Document { range: start..done.tokens.len(), hash: hash(&text) });
        done.text_bytes += text.len() as u64;
    }
    Ok(done)
}

/// The text of a row, or the reason why it is invalid.
fn text_of<'a>(
    row: &'a [u8],
    format: Format,
    field: &str,
) -> std::result::Result<Cow<'a, str>, String> {
    let text = str::from_utf8(row)
        .map_err(|error| format!("invalid UTF-8 at byte {}", error.valid_up_to()))?;
    match format {
        Format::Text | Format::Parquet => Ok(Cow::Borrowed(text)),
        Format::Jsonl => json::field_of(text, field).map(Cow::Owned),
    }
}

fn hash(text: &str) -> u64 {
    let digest = blake3::hash(text.as_bytes());
    u64::from_le_bytes(*digest.as_bytes().first_chunk().expect("32 bytes"))
}
