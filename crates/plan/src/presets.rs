//! Models with names. A preset is a `[model]` section that somebody else has typed: the keys of a run file
//! lie over it, and what both leave out is derived as always.

use crate::config::{Model, Reader};
use crate::error::ConfigError;
use crate::model::Shape;
use crate::{Config, resolve};

const TEXT: &str = include_str!("presets.toml");

/// All names, from the smallest to the largest of each kind.
pub const NAMES: [&str; 19] = [
    "gpt2-test",
    "llama-test",
    "moe-test",
    "grammar",
    "tiny",
    "small",
    "gpt2-124m",
    "gpt2-350m",
    "gpt2-774m",
    "gpt2-1.5b",
    "gpt3-13b",
    "gpt3-175b",
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "mixtral-8x7b",
    "deepseek-v2-lite",
    "deepseek-v2",
    "deepseek-v3",
];

/// What a preset types.
pub fn find(name: &str) -> Option<Model> {
    NAMES.contains(&name).then(|| {
        let mut reader = Reader::new(section(name), &[]).expect("presets.toml is TOML");
        Model::read(&mut reader, name)
    })
}

/// A preset's own lines: whoever resolves thousands of plans does not read all presets for each.
fn section(name: &str) -> &'static str {
    let start = [format!("\n[{name}]\n"), format!("\n[\"{name}\"]\n")];
    let start = start.iter().find_map(|header| TEXT.find(header.as_str()));
    let text = &TEXT[start.expect("every name has a section")..];
    let end = text[1..].find("\n[").map_or(text.len(), |end| end + 2);
    &text[..end]
}

/// A preset's shape, with the vocabulary of the data where it has none of its own.
///
/// ```
/// use lockstep_plan::presets;
/// assert_eq!(presets::shape("gpt2-124m", None).unwrap().param_count(), 124_439_808);
/// ```
pub fn shape(name: &str, data_vocab: Option<usize>) -> Result<Shape, Vec<ConfigError>> {
    let model = Model { preset: Some(name.to_string()), ..Model::default() };
    resolve::shape(&Config { model, ..Config::default() }, data_vocab)
}
