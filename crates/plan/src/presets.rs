//! Named models. A preset is a `[model]` section: keys of the run file override it, and missing keys are derived as
//! usual.

use crate::config::{Model, Reader};
use crate::error::ConfigError;
use crate::model::Shape;
use crate::{Config, resolve};

const TEXT: &str = include_str!("presets.toml");

/// Names of all presets, each family ordered by size.
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

/// The `[model]` section of a preset.
pub fn find(name: &str) -> Option<Model> {
    NAMES.contains(&name).then(|| {
        let mut reader = Reader::new(section(name), &[]).expect("presets.toml is TOML");
        Model::read(&mut reader, name)
    })
}

/// Lines of one preset. Parsing only these is faster, which matters when thousands of plans are resolved.
fn section(name: &str) -> &'static str {
    let start = [format!("\n[{name}]\n"), format!("\n[\"{name}\"]\n")];
    let start = start.iter().find_map(|header| TEXT.find(header.as_str()));
    let text = &TEXT[start.expect("every name has a section")..];
    let end = text[1..].find("\n[").map_or(text.len(), |end| end + 2);
    &text[..end]
}

/// Shape of a preset; `data_vocab` is used if the preset does not set the vocabulary.
///
/// ```
/// use lockstep_plan::presets;
/// assert_eq!(presets::shape("gpt2-124m", None).unwrap().param_count(), 124_439_808);
/// ```
pub fn shape(name: &str, data_vocab: Option<usize>) -> Result<Shape, Vec<ConfigError>> {
    let model = Model { preset: Some(name.to_string()), ..Model::default() };
    resolve::shape(&Config { model, ..Config::default() }, data_vocab)
}
