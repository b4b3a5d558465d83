//! Lines of a file, with their numbers, however long they are: what is longer than asked for comes in
//! pieces. Knows nothing of what the lines mean.

use super::input::Input;
use crate::error::{Error, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};

pub struct Lines<'a> {
    input: &'a Input,
    reader: BufReader<Box<dyn Read>>,
    /// The line that the last piece was of, from 1.
    pub line: u64,
    /// Whether the last piece ended its line.
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

    /// Reads the next line, or `limit` bytes of it, with its line end, in place of `piece`. Gives how
    /// many bytes were read: 0 at the end of the file.
    pub fn next(&mut self, piece: &mut Vec<u8>, limit: usize) -> Result<usize> {
        piece.clear();
        let starts = self.ended;
        let mut limited = (&mut self.reader).take(limit as u64);
        let read = limited.read_until(b'\n', piece);
        let read = read.map_err(Error::system("reading", &self.input.path))?;
        self.line += u64::from(starts && read > 0);
        self.ended = piece.last() == Some(&b'\n');
        // Some programs begin a file with a mark that it is UTF-8.
        if self.line == 1 && starts && piece.starts_with(b"\xef\xbb\xbf") {
            piece.drain(..3);
        }
        Ok(read)
    }

    /// Passes over what is left of the line; gives how many bytes that were.
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
