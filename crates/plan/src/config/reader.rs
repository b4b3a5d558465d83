//! Typed access to the entries of a run file. The set of valid keys is the set of keys that were read; any other key
//! is an error.

use super::entries::{self, Document, Entries, Entry, Value};
use super::nearest::nearest;
use crate::error::{ConfigError, Place};
use std::collections::{BTreeMap, BTreeSet};

pub(crate) struct Reader {
    entries: Entries,
    /// Where sections start.
    sections: BTreeMap<String, Place>,
    /// Keys that were read, whether they are set or not.
    known: BTreeSet<String>,
    errors: Vec<ConfigError>,
    /// Keys that are set, but not to a valid value.
    unreadable: BTreeSet<String>,
}

/// Result of reading, apart from the values.
pub(crate) struct Finished {
    pub places: BTreeMap<String, Place>,
    pub errors: Vec<ConfigError>,
    pub unreadable: BTreeSet<String>,
}

impl Reader {
    pub fn new(text: &str, sets: &[String]) -> Result<Reader, Vec<ConfigError>> {
        let Document { entries, sections } = entries::read(text, sets)?;
        Ok(Reader {
            entries,
            sections,
            known: BTreeSet::new(),
            errors: Vec::new(),
            unreadable: BTreeSet::new(),
        })
    }

    /// A non-negative integer.
    pub fn count(&mut self, key: &str) -> Option<usize> {
        self.take(key, "be a non-negative integer, e.g. 8", |entry| match entry.value {
            Value::Integer(integer) => usize::try_from(integer).ok(),
            // TOML reads 1e3 as a float.
            Value::Float(float) if float.fract() == 0.0 && (0.0..1e15).contains(&float) => {
                Some(float as usize)
            }
            _ => None,
        })
    }

    pub fn number(&mut self, key: &str) -> Option<f64> {
        self.take(key, "be a finite number, e.g. 0.1 or 3e-4", |entry| finite(&entry.value))
    }

    pub fn pair(&mut self, key: &str) -> Option<[f64; 2]> {
        self.take(key, "be two numbers, e.g. [0.9, 0.95]", |entry| match &entry.value {
            Value::List(items) => match items.as_slice() {
                [first, second] => Some([finite(first)?, finite(second)?]),
                _ => None,
            },
            _ => None,
        })
    }

    pub fn flag(&mut self, key: &str) -> Option<bool> {
        self.take(key, "be true or false", |entry| match entry.value {
            Value::Flag(flag) => Some(flag),
            _ => None,
        })
    }

    pub fn text(&mut self, key: &str) -> Option<String> {
        self.take(key, "be a quoted string", |entry| match (&entry.value, entry.place) {
            (Value::Text(text), _) => Some(text.clone()),
            // The shell strips quotes, so `--set name=7` is a string as well.
            (_, Place::Set) => Some(entry.typed.clone()),
            _ => None,
        })
    }

    /// One of the given words.
    pub fn word<T: Copy>(&mut self, key: &str, words: &[(&str, T)]) -> Option<T> {
        let valid: Vec<String> = words.iter().map(|(word, _)| format!("\"{word}\"")).collect();
        let expected = format!("be one of {}", valid.join(", "));
        let text = match self.entries.get(key).map(|entry| &entry.value) {
            Some(Value::Text(text)) => text.clone(),
            _ => return self.take(key, &expected, |_| None),
        };
        self.known.insert(key.to_string());
        let found = words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
        if found.is_none() {
            let suggestion = nearest(&text, words.iter().map(|(word, _)| *word))
                .map_or(String::new(), |meant| format!("did you mean \"{meant}\"?"));
            let message = format!("{} must {expected} (got \"{text}\")", last(key));
            self.error(key, message, suggestion);
        }
        found
    }

    /// A string that `parse` converts to a value, or to an error message and a suggestion.
    pub fn parsed<T>(
        &mut self,
        key: &str,
        expected: &str,
        parse: impl Fn(&str) -> Result<T, (String, String)>,
    ) -> Option<T> {
        let text = self.take(key, expected, |entry| match &entry.value {
            Value::Text(text) => Some(text.clone()),
            _ => None,
        })?;
        parse(&text).map_err(|(message, suggestion)| self.error(key, message, suggestion)).ok()
    }

    pub fn finish(mut self) -> Finished {
        let unknown: Vec<(String, Place)> = self
            .entries
            .iter()
            .filter(|(key, _)| !self.known.contains(*key))
            .map(|(key, entry)| (key.clone(), entry.place))
            .collect();
        for (key, place) in unknown {
            self.report_unknown(&key, place);
        }
        let places = self.entries.into_iter().map(|(key, entry)| (key, entry.place)).collect();
        Finished { places, errors: self.errors, unreadable: self.unreadable }
    }

    fn take<T>(
        &mut self,
        key: &str,
        expected: &str,
        read: impl Fn(&Entry) -> Option<T>,
    ) -> Option<T> {
        self.known.insert(key.to_string());
        let entry = self.entries.get(key)?;
        let value = read(entry);
        if value.is_none() {
            let message = format!("{} must {expected} (got {})", last(key), entry.typed);
            self.error(key, message, String::new());
        }
        value
    }

    fn error(&mut self, key: &str, message: String, suggestion: String) {
        let place = self.entries.get(key).map_or(Place::Default, |entry| entry.place);
        self.unreadable.insert(key.to_string());
        self.errors.push(ConfigError { key: key.into(), place, message, suggestion });
    }

    /// Reports a key that does not exist.
    fn report_unknown(&mut self, key: &str, place: Place) {
        let inside = format!("{key}.");
        if self.known.iter().any(|known| known.starts_with(&inside)) {
            // A section may be empty.
            if self.entries[key].value != Value::Section {
                let message = format!("{key} is a section, not a value");
                self.error(key, message, format!("write [{key}] with its keys below"));
            }
            return;
        }
        let sections: BTreeSet<&str> = self.known.iter().map(|known| section(known)).collect();
        match section(key) {
            // An empty table at the top.
            "" if self.entries[key].value == Value::Section => self.unknown_section(key, place),
            section if sections.contains(section) => self.unknown_key(key),
            section => self.unknown_section(section, place),
        }
    }

    /// Reports an unknown section once, for all of its keys.
    fn unknown_section(&mut self, typed: &str, place: Place) {
        let place = self.sections.get(typed).copied().unwrap_or(place);
        let sections: BTreeSet<&str> = self.known.iter().map(|known| section(known)).collect();
        let known: Vec<&str> = sections.into_iter().filter(|section| !section.is_empty()).collect();
        let suggestion = match nearest(typed, known.iter().copied()) {
            Some(meant) => format!("did you mean [{meant}]?"),
            None => format!("valid sections: {}", known.join(", ")),
        };
        match self.errors.iter_mut().find(|error| error.key == typed) {
            Some(error) => error.place = error.place.min(place),
            None => {
                let message = "unknown section".into();
                self.errors.push(ConfigError { key: typed.into(), place, message, suggestion });
            }
        }
    }

    fn unknown_key(&mut self, key: &str) {
        let siblings: Vec<&str> = self
            .known
            .iter()
            .filter(|known| section(known) == section(key))
            .map(|known| last(known))
            .collect();
        let suggestion = match self.meant(key) {
            _ if last(key) == "accumulation" => {
                "it is derived from global_batch = micro_batch × accumulation × data".into()
            }
            Some(meant) => {
                self.unreadable.insert(meant.clone());
                format!("did you mean {meant}?")
            }
            None => format!("valid keys: {}", siblings.join(", ")),
        };
        self.error(key, "unknown key".into(), suggestion);
    }

    /// The key that was probably meant; the same section is searched first.
    fn meant(&self, key: &str) -> Option<String> {
        let same_section = |known: &&String| section(known) == section(key);
        let among = |keys: Vec<&String>| -> Option<String> {
            let name = nearest(last(key), keys.iter().map(|known| last(known)))?;
            keys.iter().find(|known| last(known) == name).map(|known| known.to_string())
        };
        among(self.known.iter().filter(same_section).collect())
            .or_else(|| among(self.known.iter().collect()))
    }
}

fn finite(value: &Value) -> Option<f64> {
    match value {
        Value::Integer(integer) => Some(*integer as f64),
        Value::Float(float) => Some(*float).filter(|float| float.is_finite()),
        _ => None,
    }
}

/// `model.rope_scaling` for `model.rope_scaling.factor`.
fn section(key: &str) -> &str {
    key.rsplit_once('.').map_or("", |(section, _)| section)
}

fn last(key: &str) -> &str {
    key.rsplit_once('.').map_or(key, |(_, last)| last)
}
