//! Reading a token file where it lies: mapped, not loaded. What is small is checked when the file is
//! opened; the tokens themselves when asked.

use super::header::{ENTRY, Header, Width};
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;
use memmap2::Mmap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A token file that is open for reading.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    map: Mmap,
    header: Header,
    /// Where tokens, index and tokenizer lie.
    parts: [Range<usize>; 3],
}

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
        // writes into it nonetheless, what is read are other tokens, which are compared with the
        // vocabulary where they are used; if somebody cuts it short, the process ends by a signal.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::system("mapping", path))?;
        let header = Header::parse(&map, meta.len()).map_err(|what| Error::file(path, what))?;
        let parts = header.parts();
        let opened = TokenFile { path: path.to_path_buf(), map, header, parts };
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

    /// Reads tokens of a document, from its token `from` on, as many as `out` holds.
    pub fn read(&self, document: u64, from: u64, out: &mut [u32]) {
        let len = self.len_of(document);
        assert!(
            from + out.len() as u64 <= len,
            "tokens {from}..{} of document {document}, which has {len}",
            from + out.len() as u64
        );
        let width = self.header.width.bytes();
        let start = (self.start_of(document) + from) as usize * width;
        self.header.width.get(&self.part(0)[start..start + out.len() * width], out);
        if let Some(token) = out.iter().find(|token| **token >= self.header.vocab) {
            panic!(
                "{}: token {token} in document {document} is outside the vocabulary of {}: the file was \
                 changed after it was written; see `lockstep data inspect --check`",
                self.path.display(),
                self.header.vocab
            );
        }
    }

    /// Reads all tokens and compares them with their checksum. `progress` is told the bytes done.
    pub fn check(&self, mut progress: impl FnMut(u64)) -> Result<()> {
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

    /// 0: tokens, 1: index, 2: tokenizer.
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
