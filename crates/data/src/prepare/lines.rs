//! Numbered lines of a file. A line longer than the limit is returned in pieces.

use super::input::Input;
use crate::error::{Error, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};

pub struct Lines<'a> {
    input: &'a Input,
    reader: BufReader<Box<dyn Read>>,
    /// Line of the last piece, counted from 1.
    pub line: u64,
    /// Whether the last piece contained the end of its line.
    pub ended: bool,
}

impl<'a> Lines<'a> {
    pub fn open(input: &'a Input) -> Result<Lines<'a>> {
        let file: Box<dyn Read> = match input.is_stdin() {
            true => Box::new(std::io::stdin()),
            false => {
                Box::new(File::open(&input.path).map_err(Error::system("opening", &input.path))?)
            }
        };
        let reader = BufReader::with_capacity(128 << 10, file);
        Ok(Lines { input, reader, line: 0, ended: true })
    }

    /// Reads the next line including its line end, or `limit` bytes of it, into `piece`. Returns the number of bytes
    /// read, 0 at the end of the file.
    pub fn next(&mut self, piece: &mut Vec<u8>, limit: usize) -> Result<usize> {
        piece.clear();
        let starts = self.ended;
        let mut limited = (&mut self.reader).take(limit as u64);
        let read = limited.read_until(b'\n', piece);
        let read = read.map_err(Error::system("reading", &self.input.path))?;
        self.line += u64::from(starts && read > 0);
        self.ended = piece.last() == Some(&b'\n');
        // Skip a UTF-8 byte order mark.
        if self.line == 1 && starts && piece.starts_with(b"\xef\xbb\xbf") {
            piece.drain(..3);
        }
        Ok(read)
    }

    /// Skips the rest of the line. Returns the number of bytes skipped.
    pub fn skip(&mut self, piece: &mut Vec<u8>) -> Result<usize> {
        let mut skipped = 0;
        while !self.ended {
            let read = self.next(piece, 64 << 10)?;
            skipped += read;
            if read == 0 {
                break;
            }
        }
        Ok(skipped)
    }
}
