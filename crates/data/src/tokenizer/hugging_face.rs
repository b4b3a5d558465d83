//! Hugging Face's tokenizer.json, by their own crate. Only encodes and decodes; never downloads.

use crate::error::{Error, Result};
use tokenizers::Tokenizer;

/// What models of the last years put between documents, in the order they are looked for.
const USUAL_ENDS: [&str; 6] =
    ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end|>", "[SEP]"];

#[derive(Debug)]
pub struct Model(Tokenizer);

impl Model {
    pub fn read(json: &[u8]) -> Result<Model> {
        let mut tokenizer = Tokenizer::from_bytes(json).map_err(|e| failed("reading", e))?;
        // Files carry what their last user asked for; documents are neither cut nor filled up here.
        tokenizer.with_truncation(None).map_err(|e| failed("reading", e))?;
        tokenizer.with_padding(None);
        // A document that talks about <|endoftext|> does not end there.
        tokenizer.set_encode_special_tokens(true);
        Ok(Model(tokenizer))
    }

    /// One more than the largest token; there may be gaps below it.
    pub fn vocab(&self) -> u32 {
        self.0.get_vocab(true).into_values().max().map_or(0, |largest| largest + 1)
    }

    /// The token between documents: the one that is `wanted`, or the first of the usual ones.
    pub fn find_end(&self, wanted: Option<&str>) -> Result<u32> {
        let id = |token: &str| self.0.token_to_id(token);
        match wanted {
            Some(token) => id(token).ok_or_else(|| {
                Error::misuse(format!("no token {token}, which is to end documents (--end)"))
            }),
            None => USUAL_ENDS.into_iter().find_map(id).ok_or_else(|| {
                let usual = USUAL_ENDS.join(", ");
                Error::misuse(format!(
                    "none of {usual} is a token; say with --end what ends documents"
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
    Error::misuse(format!("{doing} with this tokenizer.json: {error}"))
}
