//! Reads text: documents between separators, or pieces of a long text that end at blank lines. A line that is not
//! UTF-8 is skipped and reported.

use super::Recipe;
use super::batch::{Batch, MAX_ROW_BYTES};
use super::input::Input;
use super::lines::Lines;
use super::pipeline::Sink;
use crate::error::Result;

const NOT_UTF8: &str = "not UTF-8; convert the file, e.g. with iconv -f ISO-8859-1 -t UTF-8";

/// Maximum bytes of a line that are read at once; less if documents are smaller.
const PIECE: usize = 32 << 10;

pub fn read<'a>(input: &'a Input, recipe: &Recipe, sink: &mut Sink<'a>) -> Result<()> {
    let mut lines = Lines::open(input)?;
    let mut batch = Batch::new(input);
    let mut document = Document { text: Vec::new(), line: 1, searched: 0 };
    let mut piece = Vec::new();
    let mut partial_char = Vec::new();
    let limit = if recipe.cut == 0 { PIECE } else { (2 * recipe.cut).clamp(64, PIECE) };
    loop {
        let mut read = lines.next(&mut piece, limit)?;
        if read == 0 {
            break;
        }
        // A character that spans two pieces belongs to the second.
        piece.splice(..0, partial_char.drain(..));
        if !lines.ended {
            partial_char = piece.split_off(complete_chars(&piece));
        }
        if str::from_utf8(&piece).is_ok() {
            document.text.extend_from_slice(&piece);
        } else {
            batch.add_bad(lines.line, NOT_UTF8);
            partial_char.clear();
            read += lines.skip(&mut piece)?;
        }
        sink.taken(read as u64);

        let blank = piece.trim_ascii().is_empty();
        while let Some(text) = match &recipe.split_on {
            Some(separator) => document.take_until(separator.as_bytes()),
            None => document.take_if_long(recipe.cut, blank),
        } {
            batch.add(document.line, &text);
            document.line = lines.line + u64::from(lines.ended);
            if batch.is_full() {
                sink.give(std::mem::replace(&mut batch, Batch::new(input)))?;
            }
        }
    }
    if !partial_char.is_empty() {
        batch.add_bad(lines.line, "ends in the middle of a UTF-8 character");
    }
    let rest = match recipe.split_on {
        Some(_) => trim_lines(&document.text),
        None => &document.text,
    };
    if !rest.is_empty() {
        batch.add(document.line, rest);
    }
    sink.give(batch)
}

/// The current document.
struct Document {
    text: Vec<u8>,
    /// First line.
    line: u64,
    /// No separator starts before this byte.
    searched: usize,
}

impl Document {
    /// Removes and returns the text before the separator, if there is one.
    fn take_until(&mut self, separator: &[u8]) -> Option<Vec<u8>> {
        let found =
            self.text[self.searched..].windows(separator.len()).position(|w| w == separator);
        if let Some(at) = found {
            let at = self.searched + at;
            let rest = self.text.split_off(at + separator.len());
            let mut text = std::mem::replace(&mut self.text, rest);
            text.truncate(at);
            self.searched = 0;
            return Some(trim_lines(&text).to_vec());
        }
        self.searched = self.text.len().saturating_sub(separator.len() - 1);
        (self.text.len() >= MAX_ROW_BYTES).then(|| self.cut_at_word())
    }

    /// Removes and returns the document if it is long enough to end here.
    fn take_if_long(&mut self, cut: usize, blank: bool) -> Option<Vec<u8>> {
        let cut = if cut == 0 { MAX_ROW_BYTES } else { cut };
        let long = self.text.len() >= 2 * cut;
        (long || blank && self.text.len() >= cut).then(|| self.cut_at_word())
    }

    /// Removes and returns the text up to the last white space.
    fn cut_at_word(&mut self) -> Vec<u8> {
        let end = self
            .text
            .iter()
            .rposition(u8::is_ascii_whitespace)
            .map_or(self.text.len(), |at| at + 1);
        let rest = self.text.split_off(end);
        self.searched = 0;
        std::mem::replace(&mut self.text, rest)
    }
}

fn trim_lines(mut text: &[u8]) -> &[u8] {
    while let [b'\n' | b'\r', rest @ ..] | [rest @ .., b'\n' | b'\r'] = text {
        text = rest;
    }
    text
}

/// Number of bytes up to the last complete UTF-8 character.
fn complete_chars(text: &[u8]) -> usize {
    match str::from_utf8(text) {
        // No error length means that the text ends within a character.
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        _ => text.len(),
    }
}
