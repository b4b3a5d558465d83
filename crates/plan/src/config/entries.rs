//! Parses the text of a run file into a flat list of dotted keys with their values and places. Knows TOML, but not
//! which keys exist.

use crate::error::{ConfigError, Place};
use std::collections::BTreeMap;
use toml::de::{DeTable, DeValue};

/// A TOML value.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Value {
    Integer(i128),
    Float(f64),
    Flag(bool),
    Text(String),
    List(Vec<Value>),
    /// An empty table.
    Section,
    /// `[[…]]`
    Sections,
    Date,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) struct Entry {
    pub value: Value,
    pub place: Place,
    /// Source text of the value.
    pub typed: String,
}

pub(super) type Entries = BTreeMap<String, Entry>;

/// All values of a run file, and where its sections start.
#[derive(Default)]
pub(super) struct Document {
    pub entries: Entries,
    pub sections: BTreeMap<String, Place>,
}

/// All values of the file, overridden by those of `--set`.
pub(super) fn read(text: &str, sets: &[String]) -> Result<Document, Vec<ConfigError>> {
    let (table, errors) = DeTable::parse_recoverable(text);
    let mut errors: Vec<ConfigError> = errors.iter().map(|error| not_toml(text, error)).collect();
    let mut document = Document::default();
    let file = |at| Place::Line(line(text, at));
    flatten(table.get_ref(), text, "", &file, &mut document);
    for set in sets {
        match set.split_once('=') {
            Some((key, value)) => override_entry(&mut document, key.trim(), value.trim()),
            None => errors.push(ConfigError {
                key: String::new(),
                place: Place::Set,
                message: format!("`{set}` has no `=`"),
                suggestion: "write for example --set train.lr=3e-4".into(),
            }),
        }
    }
    if errors.is_empty() { Ok(document) } else { Err(errors) }
}

fn not_toml(text: &str, error: &toml::de::Error) -> ConfigError {
    let start = error.span().map_or(0, |span| span.start);
    ConfigError {
        key: String::new(),
        place: Place::Line(line(text, start)),
        message: format!("invalid TOML: {}", error.message().replace('\n', ", ")),
        suggestion: "write values like 8, 3e-4, true, \"text\" or [0.9, 0.95]".into(),
    }
}

fn flatten(
    table: &DeTable,
    text: &str,
    prefix: &str,
    place: &impl Fn(usize) -> Place,
    document: &mut Document,
) {
    for (key, value) in table {
        let name = format!("{prefix}{}", key.get_ref());
        match value.get_ref() {
            DeValue::Table(inner) if !inner.is_empty() => {
                flatten(inner, text, &format!("{name}."), place, document);
                document.sections.insert(name, place(key.span().start));
            }
            leaf => {
                let typed = text.get(value.span()).unwrap_or_default().to_string();
                let place = place(key.span().start);
                document.entries.insert(name, Entry { value: value_of(leaf), place, typed });
            }
        }
    }
}

/// Replaces the entry of one `--set`. A value that is not TOML is taken as a string, so that
/// `--set model.family=llama` needs no nested quotes.
fn override_entry(document: &mut Document, key: &str, typed: &str) {
    let inside = format!("{key}.");
    document.entries.retain(|name, _| name != key && !name.starts_with(&inside));
    let value = match DeValue::parse(typed).map(|value| value.into_inner()) {
        Ok(DeValue::Table(table)) => {
            return flatten(&table, typed, &inside, &|_| Place::Set, document);
        }
        Ok(value) => value_of(&value),
        Err(_) => Value::Text(typed.to_string()),
    };
    let entry = Entry { value, place: Place::Set, typed: typed.to_string() };
    document.entries.insert(key.to_string(), entry);
}

fn value_of(value: &DeValue) -> Value {
    match value {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Integer(digits) => match i128::from_str_radix(digits.as_str(), digits.radix()) {
            Ok(integer) => Value::Integer(integer),
            Err(_) => Value::Float(f64::INFINITY),
        },
        DeValue::Float(digits) => Value::Float(digits.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(flag) => Value::Flag(*flag),
        DeValue::Array(items) if items.iter().any(|item| item.get_ref().is_table()) => {
            Value::Sections
        }
        DeValue::Array(items) => {
            Value::List(items.iter().map(|item| value_of(item.get_ref())).collect())
        }
        DeValue::Table(_) => Value::Section,
        DeValue::Datetime(_) => Value::Date,
    }
}

fn line(text: &str, at: usize) -> usize {
    1 + text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count()
}
