//! Reading a token file where it lies: mapped, not loaded. What is small is checked when the file is
//! opened; tokens, chunk by chunk, when one of the chunk is first read. Never gives tokens that are not those
//! that were written.

use super::damage::{Cause, Damage};
use super::header::{CHECKSUM, CHUNK, ENTRY, Header, LEN, Width, checksum};
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;
use memmap2::Mmap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};

/// A token file that is open for reading.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    map: Mmap,
    header: Header,
    /// Where tokens, index, tokenizer and checksums lie.
    parts: [Range<usize>; 4],
    /// What is known of each chunk of tokens that has a checksum. No state: it only saves looking twice.
    chunks: Vec<AtomicU8>,
}

// What is known of a chunk.
const UNSEEN: u8 = 0;
const RIGHT: u8 = 1;
const WRONG: u8 = 2;

impl TokenFile {
    /// Opens a file and checks everything but the tokens themselves.
    pub fn open(path: &Path) -> Result<TokenFile> {
        let file = File::open(path).map_err(Error::system("opening", path))?;
        let meta = file.metadata().map_err(Error::system("opening", path))?;
        if !meta.is_file() || meta.len() == 0 {
            return Err(Error::file(path, "not a token file: empty, or no file at all"));
        }
        // SAFETY: token files never change under their name: `prepare` renames whole files into place,
        // and a file that is replaced stays as it was for those who have it mapped. If somebody else
        // writes into it nonetheless, what is read are other tokens, which are compared with their
        // checksum and the vocabulary; if somebody cuts it short, the process ends by a signal.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::system("mapping", path))?;
        let header = Header::parse(&map, meta.len()).map_err(|what| Error::file(path, what))?;
        let parts = header.parts();
        let chunks = (0..parts[3].len() / CHECKSUM).map(|_| AtomicU8::new(UNSEEN)).collect();
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

    /// All tokens of all documents, without those between documents.
    pub fn tokens(&self) -> u64 {
        self.header.tokens
    }

    pub fn vocab(&self) -> u32 {
        self.header.vocab
    }

    /// The token that stands between documents when they are packed.
    pub fn end(&self) -> u32 {
        self.header.end
    }

    pub fn width(&self) -> Width {
        self.header.width
    }

    /// The name of the tokenizer: `bytes`, or the digest of its tokenizer.json.
    pub fn tokenizer_name(&self) -> String {
        match self.header.tokenizer {
            0 => "bytes".to_string(),
            _ => format!("tokenizer.json {}", &hex(&self.header.tokenizer_digest)[..16]),
        }
    }

    /// The tokenizer that the file carries.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        match self.header.tokenizer {
            0 => Ok(Tokenizer::bytes()),
            1 => Tokenizer::from_file_part(self.part(2), self.header.vocab, self.header.end),
            other => Err(Error::file(&self.path, format!("tokenizer of unknown kind {other}"))),
        }
    }

    /// What is inside, in 64 digits: the header has the checksums of all the rest.
    pub fn digest(&self) -> String {
        blake3::hash(&self.header.to_bytes()).to_hex().to_string()
    }

    /// How many tokens a document has.
    pub fn len_of(&self, document: u64) -> u64 {
        self.end_of(document) - self.start_of(document)
    }

    /// A number that follows from the text of a document, whatever the tokenizer.
    pub fn mark_of(&self, document: u64) -> u64 {
        self.entry(document).1
    }

    /// Reads tokens of a document, from its token `from` on, as many as `out` holds, if they are what was
    /// written.
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
        // Files of version 1 have no chunks to look at.
        let chunks = bytes.start / CHUNK..bytes.end.div_ceil(CHUNK).min(self.chunks.len());
        if let Some(chunk) = chunks.into_iter().find(|chunk| !self.is_right(*chunk)) {
            return Err(damage(chunk * CHUNK, Cause::Checksum { len: self.chunk(chunk).len() }));
        }
        self.header.width.get(&self.part(0)[bytes], out);
        let vocab = self.header.vocab;
        match out.iter().position(|token| *token >= vocab) {
            Some(at) => Err(damage(start + at * width, Cause::Token { token: out[at], vocab })),
            None => Ok(()),
        }
    }

    /// Whether a chunk of tokens has its checksum.
    fn is_right(&self, chunk: usize) -> bool {
        // Two threads may both look; they see the same.
        let known = &self.chunks[chunk];
        if known.load(Ordering::Relaxed) == UNSEEN {
            let expected = &self.part(3)[chunk * CHECKSUM..(chunk + 1) * CHECKSUM];
            let right = checksum(self.chunk(chunk)) == *expected;
            known.store(if right { RIGHT } else { WRONG }, Ordering::Relaxed);
        }
        known.load(Ordering::Relaxed) == RIGHT
    }

    fn chunk(&self, chunk: usize) -> &[u8] {
        let tokens = self.part(0);
        &tokens[chunk * CHUNK..((chunk + 1) * CHUNK).min(tokens.len())]
    }

    /// Reads all tokens and compares them with their checksums. `progress` is told the bytes done.
    pub fn check(&self, mut progress: impl FnMut(u64)) -> Result<()> {
        if !self.header.chunked {
            return self.check_whole(progress);
        }
        let mut wrong = Vec::new();
        for chunk in 0..self.chunks.len() {
            progress(self.chunk(chunk).len() as u64);
            if !self.is_right(chunk) {
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

    /// The same for a file of version 1.
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
            return wrong(changed("index of documents"));
        }
        if *blake3::hash(self.part(2)).as_bytes() != self.header.tokenizer_digest {
            return wrong(changed("tokenizer"));
        }
        let checksums = *blake3::hash(self.part(3)).as_bytes();
        if self.header.chunked && checksums != self.header.tokens_digest {
            return wrong(changed("checksums"));
        }
        // A checksum shows accidents only; what would be read outside the file is worth a look.
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
            false => wrong(format!("{before} tokens by the index, not {}", self.header.tokens)),
        }
    }

    fn start_of(&self, document: u64) -> u64 {
        document.checked_sub(1).map_or(0, |before| self.end_of(before))
    }

    fn end_of(&self, document: u64) -> u64 {
        self.entry(document).0
    }

    /// The end and the mark of a document.
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
    format!(
        "the {what} changed after they were written (the checksum differs); prepare the file anew"
    )
}

fn hex(digest: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*digest).to_hex().to_string()
}
