//! Tokens that are not what was written: where, and how it was seen.

use std::fmt;
use std::path::PathBuf;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Damage {
    pub path: PathBuf,
    /// The byte of the file at which the chunk or the token begins.
    pub offset: u64,
    /// Whose tokens were asked for.
    pub document: u64,
    pub cause: Cause,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// A chunk of this many bytes has another checksum.
    Checksum { len: usize },
    /// There is no such token.
    Token { token: u32, vocab: u32 },
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Damage { path, offset, document, cause } = self;
        write!(f, "{}, document {document}: ", path.display())?;
        match cause {
            Cause::Checksum { len } => {
                let end = offset + *len as u64;
                write!(f, "bytes {offset} to {end} are not what was written (the checksum differs)")
            }
            Cause::Token { token, vocab } => {
                write!(f, "token {token} at byte {offset} is outside the vocabulary of {vocab}")
            }
        }
    }
}
