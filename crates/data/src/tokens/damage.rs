//! Corrupt tokens: location and cause.

use std::fmt;
use std::path::PathBuf;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Damage {
    pub path: PathBuf,
    /// File offset of the corrupt chunk or token.
    pub offset: u64,
    /// Document that was read.
    pub document: u64,
    pub cause: Cause,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// The checksum of a chunk of `len` bytes does not match.
    Checksum { len: usize },
    /// The token is outside the vocabulary.
    Token { token: u32, vocab: u32 },
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Damage { path, offset, document, cause } = self;
        write!(f, "{}, document {document}: ", path.display())?;
        match cause {
            Cause::Checksum { len } => {
                let end = offset + *len as u64;
                write!(f, "bytes {offset} to {end} are corrupt (checksum mismatch)")
            }
            Cause::Token { token, vocab } => {
                write!(f, "token {token} at byte {offset} is outside the vocabulary of {vocab}")
            }
        }
    }
}
