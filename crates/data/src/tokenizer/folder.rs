//! The tokenizer in the folder of a run or of an exported model, as the files of Hugging Face's libraries. They are
//! written without parsing the tokenizer, so builds without the feature `tokenizers` write them too.

use super::{END_OF_TEXT, Inner, Tokenizer, hugging_face::Model, with_path};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;

const TOKENIZER: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";

/// Names of the files of a tokenizer. A folder may lack all but the first.
pub const TOKENIZER_FILES: [&str; 3] = [TOKENIZER, CONFIG, "special_tokens_map.json"];

/// Largest tokenizer.json.
const MAX_BYTES: u64 = 256 << 20;

/// A tokenizer as it is stored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredTokenizer {
    /// Contents of tokenizer.json.
    pub(crate) json: Vec<u8>,
    /// The end-of-document token.
    pub(crate) end: Option<u32>,
}

impl StoredTokenizer {
    /// The byte tokenizer, with or without an end-of-document token.
    pub(crate) fn bytes(end: bool) -> StoredTokenizer {
        let json = format!("{:#}\n", bytes_json(end)).into_bytes();
        StoredTokenizer { json, end: end.then_some(256) }
    }

    /// Writes tokenizer.json and tokenizer_config.json.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let mut config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false,
        });
        if let Some(end) = self.end.and_then(|end| self.token(end)) {
            config["eos_token"] = end.into();
        }
        let config = format!("{config:#}\n");
        for (name, contents) in [(TOKENIZER, &self.json[..]), (CONFIG, config.as_bytes())] {
            let path = folder.join(name);
            fs::write(&path, contents).map_err(Error::system("writing", &path))?;
        }
        Ok(())
    }

    /// Text of a token.
    fn token(&self, id: u32) -> Option<String> {
        let json: Value = serde_json::from_slice(&self.json).ok()?;
        let added = json["added_tokens"].as_array().into_iter().flatten();
        let mut added = added.filter(|token| token["id"].as_u64() == Some(id.into()));
        if let Some(token) = added.next() {
            return token["content"].as_str().map(String::from);
        }
        match &json["model"]["vocab"] {
            Value::Object(vocab) => {
                let found = vocab.iter().find(|(_, number)| number.as_u64() == Some(id.into()));
                found.map(|(text, _)| text.clone())
            }
            // Unigram: pairs of text and score, in the order of their numbers.
            Value::Array(vocab) => vocab.get(id as usize)?[0].as_str().map(String::from),
            _ => None,
        }
    }
}

impl Tokenizer {
    /// The tokenizer in the folder of a run or a model; `None` if it has none.
    pub fn load(folder: &Path) -> Result<Option<Tokenizer>> {
        let path = folder.join(TOKENIZER);
        let Ok(found) = fs::metadata(&path) else { return Ok(None) };
        if !found.is_file() || found.len() > MAX_BYTES {
            return Err(Error::file(&path, "not a regular file of at most 256 MiB"));
        }
        let json = fs::read(&path).map_err(Error::system("reading", &path))?;
        if let Some(bytes) = as_bytes(&json) {
            return Ok(Some(bytes));
        }
        let model = Model::read(&json).map_err(|error| with_path(&path, error))?;
        let end = end_token(folder).and_then(|end| model.find_end(Some(&end)).ok());
        let end = end.or_else(|| model.find_end(None).ok());
        let vocab = model.vocab();
        let model = Box::new(model);
        Ok(Some(Tokenizer { inner: Inner::HuggingFace { model, json }, vocab, end }))
    }
}

/// The byte tokenizer, if these are the contents of its tokenizer.json.
fn as_bytes(json: &[u8]) -> Option<Tokenizer> {
    let found: Value = serde_json::from_slice(json).ok()?;
    let end = [true, false].into_iter().find(|end| bytes_json(*end) == found)?;
    Some(if end { Tokenizer::bytes() } else { Tokenizer::endless_bytes() })
}

/// `eos_token` of tokenizer_config.json: a text, or an object with the text.
fn end_token(folder: &Path) -> Option<String> {
    let config: Value = serde_json::from_slice(&fs::read(folder.join(CONFIG)).ok()?).ok()?;
    let token = &config["eos_token"];
    token.as_str().or(token["content"].as_str()).map(String::from)
}

/// The byte tokenizer as tokenizer.json: byte-level BPE without merges, so that every byte is a token.
fn bytes_json(end: bool) -> Value {
    let mut others = (256..).filter_map(char::from_u32);
    // The characters that GPT-2 writes for bytes: printable ones for themselves.
    let text = |byte: u8| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => others.next().expect("there are enough characters"),
    };
    let vocab: Map<String, Value> =
        (0..=255).map(text).zip(0..).map(|(text, id)| (text.into(), json!(id))).collect();
    let added = json!({
        "id": 256, "content": END_OF_TEXT, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    });
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": if end { vec![added] } else { vec![] },
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    })
}
