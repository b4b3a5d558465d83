//! Import and export of Hugging Face folders: `config.json` and safetensors of GPT-2, Llama and Mixtral models. Reads no
//! other file format and no tokenizer.

mod config;
mod export;
mod import;
mod names;

pub use export::{Export, export};
pub use import::Source;

const CONFIG: &str = "config.json";
const ONE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
