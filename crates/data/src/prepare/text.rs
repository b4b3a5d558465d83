//! Text: documents between separators, or pieces of a long text that end where a reader would pause.
//! A line that is not UTF-8 is left out and told; the document goes on without it.

use super::Recipe;
use super::batch::{Batch, LONGEST};
use super::input::Input;
use super::lines::Lines;
use super::pipeline::Sink;
use crate::error::Result;

/// A long line is read in pieces of this size, or of a smaller one if documents are to be that small.
const PIECE: usize = 32 << 10;

pub fn read<'a>(input: &'a Input, recipe: &Recipe, sink: &mut Sink<'a>) -> Result<()> {
    let mut lines = Lines::open(input)?;
    let mut batch = Batch::new(input);
    let mut document = Document { text: Vec::new(), line: 1, searched: 0 };
    let mut piece = Vec::new();
    let mut half_letter = Vec::new();
    let limit = if recipe.cut == 0 { PIECE } else { (2 * recipe.cut).clamp(64, PIECE) };
    loop {
        let mut read = lines.next(&mut piece, limit)?;
        if read == 0 {
            break;
        }
        // A letter that lies across two pieces goes with the second.
        piece.splice(..0, half_letter.drain(..));
        if !lines.ended {
            half_letter = piece.split_off(whole_letters(&piece));
        }
        if str::from_utf8(&piece).is_ok() {
            document.text.extend_from_slice(&piece);
        } else {
            batch.add_bad(lines.line, "not UTF-8");
            half_letter.clear();
            read += lines.skip(&mut piece)?;
        }
        sink.taken(read as u64);

        let blank = piece.trim_ascii().is_empty();
        while let Some(text) = match &recipe.split_on {
            Some(separator) => document.up_to(separator.as_bytes()),
            None => document.pause(recipe.cut, blank),
        } {
            batch.add(document.line, &text);
            document.line = lines.line + u64::from(lines.ended);
            if batch.is_full() {
                sink.give(std::mem::replace(&mut batch, Batch::new(input)))?;
            }
        }
    }
    if !half_letter.is_empty() {
        batch.add_bad(lines.line, "ends in the middle of a letter");
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

/// The document that is being read.
struct Document {
    text: Vec<u8>,
    /// Where it begins.
    line: u64,
    /// No separator begins before this byte.
    searched: usize,
}

impl Document {
    /// What stands before the separator, if there is one; the text behind it stays.
    fn up_to(&mut self, separator: &[u8]) -> Option<Vec<u8>> {
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
        (self.text.len() >= LONGEST).then(|| self.cut_at_word())
    }

    /// All of it, if it is long enough and pauses here.
    fn pause(&mut self, cut: usize, blank: bool) -> Option<Vec<u8>> {
        let cut = if cut == 0 { LONGEST } else { cut };
        let long = self.text.len() >= 2 * cut;
        (long || blank && self.text.len() >= cut).then(|| self.cut_at_word())
    }

    /// All of it up to the last line end or space.
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

/// How much of the text is whole letters, if it is UTF-8 that was cut somewhere.
fn whole_letters(text: &[u8]) -> usize {
    match str::from_utf8(text) {
        // No error length means that the end came too early.
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        _ => text.len(),
    }
}
