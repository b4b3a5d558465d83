//! Writes a token file document by document. Memory does not grow with the file.

use super::header::{self, CHUNK, Header, Width, checksum};
use super::partial::Partial;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;
use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, Write};
use std::path::{Path, PathBuf};

const BUFFER: usize = 128 << 10;

pub struct Writer {
    path: PathBuf,
    partial: Partial,
    tokens: BufWriter<File>,
    /// Tokens of the current chunk.
    chunk: Vec<u8>,
    /// Index and checksums go to unnamed temporary files until the tokens are written.
    index: Hashed,
    checksums: Hashed,
    width: Width,
    documents: u64,
    count: u64,
}

impl Writer {
    pub fn create(path: &Path, tokenizer: &Tokenizer) -> Result<Writer> {
        let partial = Partial::create(path)?;
        let failed = || Error::system("writing", path);
        let mut file = partial.file.try_clone().map_err(failed())?;
        // The header is written last.
        file.write_all(&[0; header::LEN]).map_err(failed())?;
        let index = unnamed_temp(path, "index").map_err(failed())?;
        let checksums = unnamed_temp(path, "checksums").map_err(failed())?;
        Ok(Writer {
            path: path.to_path_buf(),
            partial,
            tokens: BufWriter::with_capacity(BUFFER, file),
            chunk: Vec::with_capacity(CHUNK),
            index: Hashed::new(index),
            checksums: Hashed::new(checksums),
            width: Width::of(tokenizer.vocab()),
            documents: 0,
            count: 0,
        })
    }

    /// Appends a document: its encoded tokens (`Width::put`) and the hash of its text.
    pub fn add(&mut self, tokens: &[u8], hash: u64) -> Result<()> {
        self.documents += 1;
        self.count += (tokens.len() / self.width.bytes()) as u64;
        let entry = [self.count.to_le_bytes(), hash.to_le_bytes()].concat();
        let written = self.put(tokens).and_then(|()| self.index.write(&entry));
        written.map_err(Error::system("writing", &self.path))
    }

    /// Writes tokens and the checksum of each completed chunk.
    fn put(&mut self, mut tokens: &[u8]) -> io::Result<()> {
        self.tokens.write_all(tokens)?;
        while self.chunk.len() + tokens.len() >= CHUNK {
            let (now, later) = tokens.split_at(CHUNK - self.chunk.len());
            self.chunk.extend_from_slice(now);
            self.close_chunk()?;
            tokens = later;
        }
        self.chunk.extend_from_slice(tokens);
        Ok(())
    }

    fn close_chunk(&mut self) -> io::Result<()> {
        self.checksums.write(&checksum(&self.chunk))?;
        self.chunk.clear();
        Ok(())
    }

    /// Documents and tokens so far.
    pub fn written(&self) -> (u64, u64) {
        (self.documents, self.count)
    }

    /// Assembles the parts and publishes the file.
    pub fn finish(mut self, tokenizer: &Tokenizer) -> Result<()> {
        let path = self.path.clone();
        let failed = || Error::system("writing", &path);
        let mut header = Header {
            width: self.width,
            vocab: tokenizer.vocab(),
            end: tokenizer.end().expect("`prepare` has checked it"),
            documents: self.documents,
            tokens: self.count,
            tokenizer: tokenizer.code(),
            tokenizer_len: tokenizer.json().len() as u64,
            chunked: true,
            tokens_digest: [0; 32],
            index_digest: [0; 32],
            tokenizer_digest: *blake3::hash(tokenizer.json()).as_bytes(),
        };
        let padded = header.tokens_len().expect("the written tokens fit in a file");
        let padding = padded - self.count * self.width.bytes() as u64;
        self.put(&vec![0; padding as usize]).map_err(failed())?;
        if !self.chunk.is_empty() {
            self.close_chunk().map_err(failed())?;
        }
        let Writer { partial, tokens, index, checksums, .. } = self;
        let closed = tokens.into_inner().map_err(io::IntoInnerError::into_error);
        let mut file = closed.map_err(failed())?;
        let (mut index, mut checksums) = (
            index.close(&mut header.index_digest).map_err(failed())?,
            checksums.close(&mut header.tokens_digest).map_err(failed())?,
        );
        let assembled = io::copy(&mut index, &mut file)
            .and_then(|_| file.write_all(tokenizer.json()))
            .and_then(|()| io::copy(&mut checksums, &mut file))
            .and_then(|_| file.rewind())
            .and_then(|()| file.write_all(&header.to_bytes()));
        assembled.map_err(failed())?;
        partial.publish()
    }
}

/// Creates an unnamed temporary file on the same disk as `path`.
fn unnamed_temp(path: &Path, what: &str) -> io::Result<File> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = path.with_file_name(format!(".{name}.{what}-{}", std::process::id()));
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&name)?;
    fs::remove_file(&name)?;
    Ok(file)
}

/// A file that is hashed while it is written.
struct Hashed {
    file: BufWriter<File>,
    digest: blake3::Hasher,
}

impl Hashed {
    fn new(file: File) -> Hashed {
        Hashed { file: BufWriter::with_capacity(BUFFER, file), digest: blake3::Hasher::new() }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.digest.update(bytes);
        self.file.write_all(bytes)
    }

    /// Returns the file, rewound, and its digest.
    fn close(self, digest: &mut header::Digest) -> io::Result<File> {
        *digest = *self.digest.finalize().as_bytes();
        let mut file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.rewind()?;
        Ok(file)
    }
}
