//! The 192-byte header of a token file. Pure; README.md describes the format.

use std::ops::Range;

pub const LEN: usize = 192;
const MAGIC: &[u8; 8] = b"LOCKSTOK";
/// Version that is written. Version 1, without chunk checksums, is still read.
const VERSION: u32 = 2;
/// Offset of the header's own digest.
const OWN_DIGEST: usize = 160;
/// Index bytes per document.
pub const ENTRY: u64 = 16;
/// Bytes of tokens per checksum. Small enough to verify a sample quickly; the checksums take 1/2048 of the file.
pub const CHUNK: usize = 16 << 10;
/// Checksum size.
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
    /// Whether chunks have checksums (version 2 and later).
    pub chunked: bool,
    /// Digest of the chunk checksums, or of all tokens in version 1.
    pub tokens_digest: Digest,
    pub index_digest: Digest,
    pub tokenizer_digest: Digest,
}

/// Bytes per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    Two,
    Four,
}

impl Width {
    /// The smallest width for the vocabulary.
    pub fn of(vocab: u32) -> Width {
        if vocab <= 1 << 16 { Width::Two } else { Width::Four }
    }

    pub fn bytes(self) -> usize {
        match self {
            Width::Two => 2,
            Width::Four => 4,
        }
    }

    /// Appends tokens in the file's encoding.
    pub(crate) fn put(self, tokens: &[u32], out: &mut Vec<u8>) {
        match self {
            Width::Two => out.extend(tokens.iter().flat_map(|token| (*token as u16).to_le_bytes())),
            Width::Four => out.extend(tokens.iter().flat_map(|token| token.to_le_bytes())),
        }
    }

    /// Decodes `out.len()` tokens.
    pub(crate) fn get(self, bytes: &[u8], out: &mut [u32]) {
        assert_eq!(bytes.len(), out.len() * self.bytes(), "bytes of {} tokens", out.len());
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

    /// Parses and validates the header of a file of `len` bytes.
    pub fn parse(start: &[u8], len: u64) -> Result<Header, String> {
        if start.get(..8) != Some(MAGIC) {
            return Err("not a token file; make one with `lockstep data prepare`".to_string());
        }
        let Some(bytes) = start.get(..LEN) else {
            return Err(format!("truncated: the file has {len} bytes, the header alone {LEN}"));
        };
        let four = |at| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let eight = |at| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let digest = |at| -> Digest { bytes[at..at + 32].try_into().expect("32 bytes") };

        // Check the version first: other versions may store their checksum elsewhere.
        if !(1..=VERSION).contains(&four(8)) {
            return Err(format!(
                "token file version {} is not supported (this program reads 1 to {VERSION}); prepare the file again",
                four(8)
            ));
        }
        if digest(OWN_DIGEST) != *blake3::hash(&bytes[..OWN_DIGEST]).as_bytes() {
            return Err("the header is corrupt (checksum mismatch); prepare the file again".into());
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
                "invalid header: {} bytes per token, end token {}, vocabulary {}",
                four(12),
                header.end,
                header.vocab
            ));
        }
        match header.file_len() {
            Some(expected) if expected == len => Ok(header),
            Some(expected) if expected > len => {
                Err(format!("truncated: {len} of {expected} bytes; copy or prepare the file again"))
            }
            _ => Err(format!("the file has {len} bytes, more than its header describes")),
        }
    }

    /// Bytes of the tokens including padding; `None` on overflow.
    pub fn tokens_len(&self) -> Option<u64> {
        self.tokens.checked_mul(self.width.bytes() as u64)?.checked_next_multiple_of(8)
    }

    /// Bytes of the chunk checksums.
    fn checksums_len(&self) -> Option<u64> {
        let chunks = if self.chunked { self.tokens_len()?.div_ceil(CHUNK as u64) } else { 0 };
        Some(chunks * CHECKSUM as u64)
    }

    pub fn file_len(&self) -> Option<u64> {
        let index = self.documents.checked_mul(ENTRY)?;
        let both = self.tokens_len()?.checked_add(index)?.checked_add(LEN as u64)?;
        both.checked_add(self.tokenizer_len)?.checked_add(self.checksums_len()?)
    }

    /// Byte ranges of tokens, index, tokenizer and checksums.
    pub fn parts(&self) -> [Range<usize>; 4] {
        let checked = "the header was checked";
        let tokens = LEN + self.tokens_len().expect(checked) as usize;
        let index = tokens + (self.documents * ENTRY) as usize;
        let tokenizer = index + self.tokenizer_len as usize;
        let checksums = tokenizer + self.checksums_len().expect(checked) as usize;
        [LEN..tokens, tokens..index, index..tokenizer, tokenizer..checksums]
    }
}

/// Checksum of a chunk of tokens.
pub fn checksum(chunk: &[u8]) -> [u8; CHECKSUM] {
    *blake3::hash(chunk).as_bytes().first_chunk().expect("a digest is longer")
}
