//! Hugging Face tokenizer.json files, through the `tokenizers` crate. Never downloads.

use crate::error::{Error, Result};
use tokenizers::Tokenizer;

/// Common end-of-document tokens, in order of preference.
const COMMON_ENDS: [&str; 6] =
    ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end|>", "[SEP]"];

#[derive(Debug)]
pub struct Model(Tokenizer);

impl Model {
    pub fn read(json: &[u8]) -> Result<Model> {
        let mut tokenizer = Tokenizer::from_bytes(json).map_err(|e| failed("reading", e))?;
        // Ignore truncation and padding settings stored in the file.
        tokenizer.with_truncation(None).map_err(|e| failed("reading", e))?;
        tokenizer.with_padding(None);
        // The text "<|endoftext|>" in a document is ordinary text.
        tokenizer.set_encode_special_tokens(true);
        Ok(Model(tokenizer))
    }

    /// The largest token plus one.
    pub fn vocab(&self) -> u32 {
        self.0.get_vocab(true).into_values().max().map_or(0, |largest| largest + 1)
    }

    /// The end-of-document token: `wanted`, or the first of the common ones.
    pub fn find_end(&self, wanted: Option<&str>) -> Result<u32> {
        let id = |token: &str| self.0.token_to_id(token);
        match wanted {
            Some(token) => id(token).ok_or_else(|| {
                Error::misuse(format!("no token {token} in this tokenizer (--end)"))
            }),
            None => COMMON_ENDS.into_iter().find_map(id).ok_or_else(|| {
                let common = COMMON_ENDS.join(", ");
                Error::misuse(format!(
                    "no end-of-document token found (tried {common}); set it with --end"
                ))
            }),
        }
    }

    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.0.encode_fast(text, false).map_err(|e| failed("encoding", e))?;
        Ok(encoding.get_ids().to_vec())
    }

    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.0.decode(tokens, false).map_err(|e| failed("decoding", e))
    }
}

fn failed(doing: &str, error: tokenizers::Error) -> Error {
    Error::misuse(format!("{doing} tokenizer.json: {error}"))
}
