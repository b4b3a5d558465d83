//! The first 192 bytes of a token file, and what follows from them. Pure; README.md has the table.

use std::ops::Range;

pub const LEN: usize = 192;
const MAGIC: &[u8; 8] = b"LOCKSTOK";
/// What is written. Version 1, which had no checksums of chunks, is read too.
const VERSION: u32 = 2;
/// Where the digest of the header itself stands.
const OWN_DIGEST: usize = 160;
/// Bytes of the index per document.
pub const ENTRY: u64 = 16;
/// Bytes of tokens that have a checksum of their own: what a sample lies in is soon read through, and the
/// checksums are a two-thousandth of the file.
pub const CHUNK: usize = 16 << 10;
/// Bytes of a chunk's checksum.
pub const CHECKSUM: usize = 8;

pub type Digest = [u8; 32];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub width: Width,
    pub vocab: u32,
    pub end: u32,
    pub documents: u64,
    pub tokens: u64,
    /// 0: bytes, 1: a tokenizer.json.
    pub tokenizer: u32,
    pub tokenizer_len: u64,
    /// Whether chunks of tokens have checksums: from version 2 on.
    pub chunked: bool,
    /// Of the chunks' checksums where there are some, or of all tokens.
    pub tokens_digest: Digest,
    pub index_digest: Digest,
    pub tokenizer_digest: Digest,
}

/// How a token is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    Two,
    Four,
}

impl Width {
    /// The narrowest that holds all tokens of the vocabulary.
    pub fn of(vocab: u32) -> Width {
        if vocab <= 1 << 16 { Width::Two } else { Width::Four }
    }

    pub fn bytes(self) -> usize {
        match self {
            Width::Two => 2,
            Width::Four => 4,
        }
    }

    /// Appends tokens, as the file holds them.
    pub(crate) fn put(self, tokens: &[u32], out: &mut Vec<u8>) {
        match self {
            Width::Two => out.extend(tokens.iter().flat_map(|token| (*token as u16).to_le_bytes())),
            Width::Four => out.extend(tokens.iter().flat_map(|token| token.to_le_bytes())),
        }
    }

    /// Reads as many tokens as `out` holds.
    pub(crate) fn get(self, bytes: &[u8], out: &mut [u32]) {
        assert_eq!(bytes.len(), out.len() * self.bytes(), "the bytes of {} tokens", out.len());
        match self {
            Width::Two => {
                let tokens = bytes.as_chunks::<2>().0;
                out.iter_mut().zip(tokens).for_each(|(to, b)| *to = u16::from_le_bytes(*b).into());
            }
            Width::Four => {
                let tokens = bytes.as_chunks::<4>().0;
                out.iter_mut().zip(tokens).for_each(|(to, b)| *to = u32::from_le_bytes(*b));
            }
        }
    }
}

impl Header {
    pub fn to_bytes(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[..8].copy_from_slice(MAGIC);
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(8, &(if self.chunked { VERSION } else { 1 }).to_le_bytes());
        put(12, &(self.width.bytes() as u32).to_le_bytes());
        put(16, &self.vocab.to_le_bytes());
        put(20, &self.end.to_le_bytes());
        put(24, &self.documents.to_le_bytes());
        put(32, &self.tokens.to_le_bytes());
        put(40, &self.tokenizer.to_le_bytes());
        put(48, &self.tokenizer_len.to_le_bytes());
        put(64, &self.tokens_digest);
        put(96, &self.index_digest);
        put(128, &self.tokenizer_digest);
        let own = *blake3::hash(&bytes[..OWN_DIGEST]).as_bytes();
        bytes[OWN_DIGEST..].copy_from_slice(&own);
        bytes
    }

    /// What the start of a file of `len` bytes says, or what is wrong with it.
    pub fn parse(start: &[u8], len: u64) -> Result<Header, String> {
        if start.get(..8) != Some(MAGIC) {
            return Err("not a token file; `lockstep data prepare` makes one from text".to_string());
        }
        let Some(bytes) = start.get(..LEN) else {
            return Err(format!("cut short: {len} bytes do not hold the header of {LEN}"));
        };
        let four = |at| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let eight = |at| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let digest = |at| -> Digest { bytes[at..at + 32].try_into().expect("32 bytes") };

        // The version comes first: another one may keep its checksum elsewhere.
        if !(1..=VERSION).contains(&four(8)) {
            return Err(format!(
                "a token file of version {}, and this program reads versions 1 to {VERSION}; prepare it anew",
                four(8)
            ));
        }
        if digest(OWN_DIGEST) != *blake3::hash(&bytes[..OWN_DIGEST]).as_bytes() {
            return Err("the header was changed after it was written (its checksum differs)".into());
        }
        let header = Header {
            width: if four(12) == 2 { Width::Two } else { Width::Four },
            vocab: four(16),
            end: four(20),
            documents: eight(24),
            tokens: eight(32),
            tokenizer: four(40),
            tokenizer_len: eight(48),
            chunked: four(8) > 1,
            tokens_digest: digest(64),
            index_digest: digest(96),
            tokenizer_digest: digest(128),
        };
        if four(12) as usize != header.width.bytes() || header.end >= header.vocab {
            return Err(format!(
                "makes no sense: {} bytes per token, end token {} of {}",
                four(12),
                header.end,
                header.vocab
            ));
        }
        match header.file_len() {
            Some(expected) if expected == len => Ok(header),
            Some(expected) if expected > len => Err(format!(
                "cut short: {len} bytes of {expected}; prepare it anew or copy it again"
            )),
            _ => Err(format!("{len} bytes, which is more than the header speaks of")),
        }
    }

    /// The bytes of the tokens with the zeros behind them; `None` if no file can be that long.
    pub fn tokens_len(&self) -> Option<u64> {
        self.tokens.checked_mul(self.width.bytes() as u64)?.checked_next_multiple_of(8)
    }

    /// The bytes of the chunks' checksums.
    fn checksums_len(&self) -> Option<u64> {
        let chunks = if self.chunked { self.tokens_len()?.div_ceil(CHUNK as u64) } else { 0 };
        Some(chunks * CHECKSUM as u64)
    }

    pub fn file_len(&self) -> Option<u64> {
        let index = self.documents.checked_mul(ENTRY)?;
        let both = self.tokens_len()?.checked_add(index)?.checked_add(LEN as u64)?;
        both.checked_add(self.tokenizer_len)?.checked_add(self.checksums_len()?)
    }

    /// Where tokens, index, tokenizer and checksums lie in a file that has this header.
    pub fn parts(&self) -> [Range<usize>; 4] {
        let checked = "the header was checked";
        let tokens = LEN + self.tokens_len().expect(checked) as usize;
        let index = tokens + (self.documents * ENTRY) as usize;
        let tokenizer = index + self.tokenizer_len as usize;
        let checksums = tokenizer + self.checksums_len().expect(checked) as usize;
        [LEN..tokens, tokens..index, index..tokenizer, tokenizer..checksums]
    }
}

/// The checksum of a chunk of tokens.
pub fn checksum(chunk: &[u8]) -> [u8; CHECKSUM] {
    *blake3::hash(chunk).as_bytes().first_chunk().expect("a digest is longer")
}
