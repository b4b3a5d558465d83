//! Text to tokens and back: bytes, built in, or any Hugging Face tokenizer.json.
//! Never adds tokens that are not in the text: what stands between documents is put there by packing.

#[cfg(feature = "tokenizers")]
mod hugging_face;
#[cfg(not(feature = "tokenizers"))]
#[path = "not_built.rs"]
mod hugging_face;

use crate::error::{Error, Result};
use hugging_face::Model;
use std::path::Path;

/// How the end of a document is written when tokens are shown as text.
const END_OF_TEXT: &str = "<|endoftext|>";

/// A tokenizer, and the token that it puts between documents.
#[derive(Debug)]
pub struct Tokenizer {
    kind: Kind,
    vocab: u32,
    end: u32,
}

#[derive(Debug)]
enum Kind {
    Bytes,
    HuggingFace { model: Box<Model>, json: Vec<u8> },
}

impl Tokenizer {
    /// Tokens 0 to 255 are the bytes of the text, 256 is the end of a document; 257 in all.
    ///
    /// ```
    /// use lockstep_data::Tokenizer;
    ///
    /// let tokenizer = Tokenizer::bytes();
    /// assert_eq!(tokenizer.encode("né").unwrap(), [110, 195, 169]);
    /// assert_eq!(tokenizer.decode(&[110, 195, 169, 256]).unwrap(), "né<|endoftext|>");
    /// ```
    pub fn bytes() -> Tokenizer {
        Tokenizer { kind: Kind::Bytes, vocab: 257, end: 256 }
    }

    /// `bytes`, or a tokenizer.json (or the folder it lies in). `end` is the text of the token to put
    /// between documents; without it, the usual ones are looked for.
    pub fn open(spec: &str, end: Option<&str>) -> Result<Tokenizer> {
        if spec == "bytes" {
            return match end {
                None | Some(END_OF_TEXT) => Ok(Tokenizer::bytes()),
                Some(end) => Err(Error::misuse(format!(
                    "the bytes tokenizer ends documents with {END_OF_TEXT}, not {end}; leave --end out"
                ))),
            };
        }
        let mut path = Path::new(spec).to_path_buf();
        if path.is_dir() {
            path.push("tokenizer.json");
        }
        let json = std::fs::read(&path).map_err(Error::system("reading tokenizer", &path))?;
        let model = Model::read(&json).map_err(|error| naming(&path, error))?;
        let end = model.find_end(end).map_err(|error| naming(&path, error))?;
        let vocab = model.vocab();
        Ok(Tokenizer { kind: Kind::HuggingFace { model: Box::new(model), json }, vocab, end })
    }

    /// The tokenizer that a token file carries.
    pub(crate) fn from_file_part(json: &[u8], vocab: u32, end: u32) -> Result<Tokenizer> {
        let model = Box::new(Model::read(json)?);
        Ok(Tokenizer { kind: Kind::HuggingFace { model, json: json.to_vec() }, vocab, end })
    }

    /// One more than the largest token.
    pub fn vocab(&self) -> u32 {
        self.vocab
    }

    /// The token that ends a document.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// The tokens of a text. What looks like a special token is text like any other.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::HuggingFace { model, .. } => model.encode(text),
        }
    }

    /// The text of tokens, with special tokens shown. Bytes that are not UTF-8 become `�`.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        match &self.kind {
            Kind::Bytes => Ok(bytes_to_text(tokens)),
            Kind::HuggingFace { model, .. } => model.decode(tokens),
        }
    }

    /// What a token file says of its tokenizer.
    pub(crate) fn kind(&self) -> u32 {
        match self.kind {
            Kind::Bytes => 0,
            Kind::HuggingFace { .. } => 1,
        }
    }

    /// What a token file carries of it.
    pub(crate) fn json(&self) -> &[u8] {
        match &self.kind {
            Kind::Bytes => &[],
            Kind::HuggingFace { json, .. } => json,
        }
    }
}

pub(crate) fn bytes_to_text(tokens: &[u32]) -> String {
    let mut bytes = Vec::with_capacity(tokens.len());
    for token in tokens {
        match u8::try_from(*token) {
            Ok(byte) => bytes.push(byte),
            Err(_) => bytes.extend(END_OF_TEXT.bytes()),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn naming(path: &Path, error: Error) -> Error {
    match error {
        Error::Misuse { what } => Error::file(path, what),
        other => other,
    }
}
