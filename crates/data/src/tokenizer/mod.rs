//! Tokenizers: bytes (built in) or any Hugging Face tokenizer.json. Encoding adds no special tokens; packing adds the
//! end-of-document token.

mod folder;
#[cfg(feature = "tokenizers")]
mod hugging_face;
#[cfg(not(feature = "tokenizers"))]
#[path = "not_built.rs"]
mod hugging_face;

use crate::error::{Error, Result};
pub use folder::{StoredTokenizer, TOKENIZER_FILES};
use hugging_face::Model;
use std::path::Path;

/// Text shown for the end-of-document token of the byte tokenizer.
const END_OF_TEXT: &str = "<|endoftext|>";

/// A tokenizer and its end-of-document token.
#[derive(Debug)]
pub struct Tokenizer {
    inner: Inner,
    vocab: u32,
    end: Option<u32>,
}

#[derive(Debug)]
enum Inner {
    Bytes,
    HuggingFace { model: Box<Model>, json: Vec<u8> },
}

impl Tokenizer {
    /// The byte tokenizer: tokens 0 to 255 are bytes, 256 ends a document.
    ///
    /// ```
    /// use lockstep_data::Tokenizer;
    ///
    /// let tokenizer = Tokenizer::bytes();
    /// assert_eq!(tokenizer.encode("né").unwrap(), [110, 195, 169]);
    /// assert_eq!(tokenizer.decode(&[110, 195, 169, 256]).unwrap(), "né<|endoftext|>");
    /// ```
    pub fn bytes() -> Tokenizer {
        Tokenizer { inner: Inner::Bytes, vocab: 257, end: Some(256) }
    }

    /// The byte tokenizer of a text without documents.
    pub(crate) fn endless_bytes() -> Tokenizer {
        Tokenizer { inner: Inner::Bytes, vocab: 256, end: None }
    }

    /// Opens `bytes`, or a tokenizer.json or its folder. `end` is the end-of-document token; by default the common ones
    /// are tried.
    pub fn open(spec: &str, end: Option<&str>) -> Result<Tokenizer> {
        if spec == "bytes" {
            return match end {
                None | Some(END_OF_TEXT) => Ok(Tokenizer::bytes()),
                Some(end) => Err(Error::misuse(format!(
                    "the bytes tokenizer ends documents with {END_OF_TEXT}, not {end}; remove --end"
                ))),
            };
        }
        let mut path = Path::new(spec).to_path_buf();
        if path.is_dir() {
            path.push("tokenizer.json");
        }
        let json = std::fs::read(&path).map_err(Error::system("reading tokenizer", &path))?;
        let model = Model::read(&json).map_err(|error| with_path(&path, error))?;
        let end = Some(model.find_end(end).map_err(|error| with_path(&path, error))?);
        let vocab = model.vocab();
        Ok(Tokenizer { inner: Inner::HuggingFace { model: Box::new(model), json }, vocab, end })
    }

    /// The tokenizer stored in a token file.
    pub(crate) fn from_file_part(json: &[u8], vocab: u32, end: u32) -> Result<Tokenizer> {
        let model = Box::new(Model::read(json)?);
        let inner = Inner::HuggingFace { model, json: json.to_vec() };
        Ok(Tokenizer { inner, vocab, end: Some(end) })
    }

    /// The largest token plus one.
    pub fn vocab(&self) -> u32 {
        self.vocab
    }

    /// The end-of-document token, if there is one.
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// Encodes a text. Special tokens in the text are encoded as ordinary text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.inner {
            Inner::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Inner::HuggingFace { model, .. } => model.encode(text),
        }
    }

    /// Decodes tokens, including special tokens. Invalid UTF-8 becomes `�`.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        match &self.inner {
            Inner::Bytes => Ok(bytes_to_text(tokens)),
            Inner::HuggingFace { model, .. } => model.decode(tokens),
        }
    }

    /// Tokenizer code in the header of a token file.
    pub(crate) fn code(&self) -> u32 {
        match self.inner {
            Inner::Bytes => 0,
            Inner::HuggingFace { .. } => 1,
        }
    }

    /// The tokenizer.json stored in a token file; empty for bytes.
    pub(crate) fn json(&self) -> &[u8] {
        match &self.inner {
            Inner::Bytes => &[],
            Inner::HuggingFace { json, .. } => json,
        }
    }
}

fn bytes_to_text(tokens: &[u32]) -> String {
    let mut bytes = Vec::with_capacity(tokens.len());
    for token in tokens {
        match u8::try_from(*token) {
            Ok(byte) => bytes.push(byte),
            Err(_) => bytes.extend(END_OF_TEXT.bytes()),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn with_path(path: &Path, error: Error) -> Error {
    match error {
        Error::Misuse { what } => Error::file(path, what),
        other => other,
    }
}
