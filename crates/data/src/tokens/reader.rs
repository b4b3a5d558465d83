//! Memory-mapped token files. Header, index and tokenizer are verified when the file is opened; each chunk of tokens
//! when it is first read. Unverified tokens are never returned.

use super::damage::{Cause, Damage};
use super::header::{CHECKSUM, CHUNK, ENTRY, Header, LEN, Width, checksum};
use crate::error::{Error, Result};
use crate::tokenizer::{StoredTokenizer, Tokenizer};
use memmap2::Mmap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};

/// A token file opened for reading.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    map: Mmap,
    header: Header,
    /// Byte ranges of tokens, index, tokenizer and checksums.
    parts: [Range<usize>; 4],
    /// Verification state of each chunk; a cache.
    chunks: Vec<AtomicU8>,
}

// Verification state of a chunk.
const UNCHECKED: u8 = 0;
const VALID: u8 = 1;
const CORRUPT: u8 = 2;

impl TokenFile {
    /// Opens a file and verifies everything except the tokens.
    pub fn open(path: &Path) -> Result<TokenFile> {
        // Checked before opening: opening a named pipe would block.
        let meta = std::fs::metadata(path).map_err(Error::system("opening", path))?;
        if !meta.is_file() || meta.len() == 0 {
            return Err(Error::file(path, "not a token file: empty or not a regular file"));
        }
        let file = File::open(path).map_err(Error::system("opening", path))?;
        let meta = file.metadata().map_err(Error::system("opening", path))?;
        // SAFETY: `prepare` renames complete files into place and never modifies them; a replaced file stays
        // unchanged for processes that have it mapped. If another program writes into the file, the tokens fail their
        // checksum or vocabulary check; if it truncates the file, the process ends with a signal.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::system("mapping", path))?;
        let header = Header::parse(&map, meta.len()).map_err(|what| Error::file(path, what))?;
        let parts = header.parts();
        let chunks = (0..parts[3].len() / CHECKSUM).map(|_| AtomicU8::new(UNCHECKED)).collect();
        let opened = TokenFile { path: path.to_path_buf(), map, header, parts, chunks };
        opened.check_index()?;
        Ok(opened)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn documents(&self) -> u64 {
        self.header.documents
    }

    /// Tokens of all documents, without end tokens.
    pub fn tokens(&self) -> u64 {
        self.header.tokens
    }

    pub fn vocab(&self) -> u32 {
        self.header.vocab
    }

    /// The end-of-document token.
    pub fn end(&self) -> u32 {
        self.header.end
    }

    pub fn width(&self) -> Width {
        self.header.width
    }

    /// Name of the tokenizer: `bytes`, or the digest of its tokenizer.json.
    pub fn tokenizer_name(&self) -> String {
        match self.header.tokenizer {
            0 => "bytes".to_string(),
            _ => format!("tokenizer.json {}", &hex(&self.header.tokenizer_digest)[..16]),
        }
    }

    /// The tokenizer stored in the file.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        match self.header.tokenizer {
            0 => Ok(Tokenizer::bytes()),
            1 => Tokenizer::from_file_part(self.part(2), self.header.vocab, self.header.end),
            other => Err(Error::file(&self.path, format!("unknown tokenizer code {other}"))),
        }
    }

    /// The tokenizer as it is stored, without parsing it.
    pub fn stored_tokenizer(&self) -> StoredTokenizer {
        match self.header.tokenizer {
            0 => StoredTokenizer::bytes(true),
            _ => StoredTokenizer { json: self.part(2).to_vec(), end: Some(self.header.end) },
        }
    }

    /// Digest of the contents as 64 hex digits. The header contains the checksums of everything else.
    pub fn digest(&self) -> String {
        blake3::hash(&self.header.to_bytes()).to_hex().to_string()
    }

    /// Tokens of a document.
    pub fn len_of(&self, document: u64) -> u64 {
        self.end_of(document) - self.start_of(document)
    }

    /// Hash of a document's text, independent of the tokenizer.
    pub fn hash_of(&self, document: u64) -> u64 {
        self.entry(document).1
    }

    /// Reads `out.len()` tokens of a document starting at token `from`, and verifies them.
    pub fn read(&self, document: u64, from: u64, out: &mut [u32]) -> Result<(), Damage> {
        let len = self.len_of(document);
        assert!(
            from + out.len() as u64 <= len,
            "tokens {from}..{} of document {document}, which has {len}",
            from + out.len() as u64
        );
        let width = self.header.width.bytes();
        let start = (self.start_of(document) + from) as usize * width;
        let bytes = start..start + out.len() * width;
        let damage = |at: usize, cause| Damage {
            path: self.path.clone(),
            offset: (LEN + at) as u64,
            document,
            cause,
        };
        // Version 1 has no chunk checksums.
        let chunks = bytes.start / CHUNK..bytes.end.div_ceil(CHUNK).min(self.chunks.len());
        if let Some(chunk) = chunks.into_iter().find(|chunk| !self.is_valid(*chunk)) {
            return Err(damage(chunk * CHUNK, Cause::Checksum { len: self.chunk(chunk).len() }));
        }
        self.header.width.get(&self.part(0)[bytes], out);
        let vocab = self.header.vocab;
        match out.iter().position(|token| *token >= vocab) {
            Some(at) => Err(damage(start + at * width, Cause::Token { token: out[at], vocab })),
            None => Ok(()),
        }
    }

    /// Whether a chunk matches its checksum.
    fn is_valid(&self, chunk: usize) -> bool {
        // Two threads may both verify a chunk, with the same result.
        let state = &self.chunks[chunk];
        if state.load(Ordering::Relaxed) == UNCHECKED {
            let expected = &self.part(3)[chunk * CHECKSUM..(chunk + 1) * CHECKSUM];
            let valid = checksum(self.chunk(chunk)) == *expected;
            state.store(if valid { VALID } else { CORRUPT }, Ordering::Relaxed);
        }
        state.load(Ordering::Relaxed) == VALID
    }

    fn chunk(&self, chunk: usize) -> &[u8] {
        let tokens = self.part(0);
        &tokens[chunk * CHUNK..((chunk + 1) * CHUNK).min(tokens.len())]
    }

    /// Verifies all tokens. `progress` is called with the number of bytes verified.
    pub fn check(&self, mut progress: impl FnMut(u64)) -> Result<()> {
        if !self.header.chunked {
            return self.check_whole(progress);
        }
        let mut wrong = Vec::new();
        for chunk in 0..self.chunks.len() {
            progress(self.chunk(chunk).len() as u64);
            if !self.is_valid(chunk) {
                wrong.push(LEN + chunk * CHUNK);
            }
        }
        let Some(first) = wrong.first() else { return Ok(()) };
        let what = format!(
            "{}: {} of {} chunks, the first at byte {first}",
            changed("tokens"),
            wrong.len(),
            self.chunks.len()
        );
        Err(Error::file(&self.path, what))
    }

    /// Verifies a file of version 1.
    fn check_whole(&self, mut progress: impl FnMut(u64)) -> Result<()> {
        let mut digest = blake3::Hasher::new();
        for piece in self.part(0).chunks(1 << 20) {
            digest.update(piece);
            progress(piece.len() as u64);
        }
        if *digest.finalize().as_bytes() != self.header.tokens_digest {
            return Err(Error::file(&self.path, changed("tokens")));
        }
        Ok(())
    }

    fn check_index(&self) -> Result<()> {
        let wrong = |what: String| Err(Error::file(&self.path, what));
        if *blake3::hash(self.part(1)).as_bytes() != self.header.index_digest {
            return wrong(changed("document index entries"));
        }
        if *blake3::hash(self.part(2)).as_bytes() != self.header.tokenizer_digest {
            return wrong(changed("tokenizer bytes"));
        }
        let checksums = *blake3::hash(self.part(3)).as_bytes();
        if self.header.chunked && checksums != self.header.tokens_digest {
            return wrong(changed("checksums"));
        }
        // A checksum only detects accidents: also check that no document extends outside the file.
        let mut before = 0;
        for document in 0..self.header.documents {
            let end = self.end_of(document);
            if end < before {
                return wrong(format!("document {document} ends before it starts"));
            }
            before = end;
        }
        match before == self.header.tokens {
            true => Ok(()),
            false => {
                wrong(format!("the index has {before} tokens, the header {}", self.header.tokens))
            }
        }
    }

    fn start_of(&self, document: u64) -> u64 {
        document.checked_sub(1).map_or(0, |before| self.end_of(before))
    }

    fn end_of(&self, document: u64) -> u64 {
        self.entry(document).0
    }

    /// End and hash of a document.
    fn entry(&self, document: u64) -> (u64, u64) {
        let at = (document * ENTRY) as usize;
        let entry = &self.part(1)[at..at + ENTRY as usize];
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        (number(&entry[..8]), number(&entry[8..]))
    }

    /// 0: tokens, 1: index, 2: tokenizer, 3: checksums.
    fn part(&self, which: usize) -> &[u8] {
        &self.map[self.parts[which].clone()]
    }
}

fn changed(what: &str) -> String {
    format!("the {what} are corrupt (checksum mismatch); prepare the file again")
}

fn hex(digest: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*digest).to_hex().to_string()
}
