//! Takes values of the wanted type out of what was typed. A key is known because somebody asked for it:
//! what nobody asked for is a mistake.

use super::entries::{self, Entries, Entry, Value};
use super::nearest::nearest;
use crate::error::{ConfigError, Place};
use std::collections::{BTreeMap, BTreeSet};

pub(crate) struct Reader {
    entries: Entries,
    asked: BTreeSet<String>,
    errors: Vec<ConfigError>,
    /// Keys that somebody tried to type.
    unreadable: BTreeSet<String>,
}

/// What is left when all keys have been asked for.
pub(crate) struct Finished {
    pub places: BTreeMap<String, Place>,
    pub errors: Vec<ConfigError>,
    pub unreadable: BTreeSet<String>,
}

impl Reader {
    pub fn new(text: &str, sets: &[String]) -> Result<Reader, Vec<ConfigError>> {
        let entries = entries::read(text, sets)?;
        Ok(Reader {
            entries,
            asked: BTreeSet::new(),
            errors: Vec::new(),
            unreadable: BTreeSet::new(),
        })
    }

    /// A whole number, 0 or more.
    pub fn count(&mut self, key: &str) -> Option<usize> {
        self.take(key, "a whole number such as 8", |entry| match entry.value {
            Value::Integer(integer) => usize::try_from(integer).ok(),
            // 1e3 is a float to TOML and a thousand to whoever typed it.
            Value::Float(float) if float.fract() == 0.0 && (0.0..1e15).contains(&float) => {
                Some(float as usize)
            }
            _ => None,
        })
    }

    pub fn number(&mut self, key: &str) -> Option<f64> {
        self.take(key, "a number such as 0.1 or 3e-4", |entry| finite(&entry.value))
    }

    pub fn pair(&mut self, key: &str) -> Option<[f64; 2]> {
        self.take(key, "two numbers such as [0.9, 0.95]", |entry| match &entry.value {
            Value::List(items) => match items.as_slice() {
                [first, second] => Some([finite(first)?, finite(second)?]),
                _ => None,
            },
            _ => None,
        })
    }

    pub fn flag(&mut self, key: &str) -> Option<bool> {
        self.take(key, "true or false", |entry| match entry.value {
            Value::Flag(flag) => Some(flag),
            _ => None,
        })
    }

    pub fn text(&mut self, key: &str) -> Option<String> {
        self.take(key, "text in quotes", |entry| match (&entry.value, entry.place) {
            (Value::Text(text), _) => Some(text.clone()),
            // A shell has no quotes left to show: `--set name=7` is text as well.
            (_, Place::Set) => Some(entry.typed.clone()),
            _ => None,
        })
    }

    /// One word of a list.
    pub fn word<T: Copy>(&mut self, key: &str, words: &[(&str, T)]) -> Option<T> {
        let known: Vec<String> = words.iter().map(|(word, _)| format!("\"{word}\"")).collect();
        let known = known.join(", ");
        let text = match self.entries.get(key).map(|entry| &entry.value) {
            Some(Value::Text(text)) => text.clone(),
            _ => return self.take(key, &format!("one of {known}"), |_| None),
        };
        self.asked.insert(key.to_string());
        let found = words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
        if found.is_none() {
            let suggestion = match nearest(&text, words.iter().map(|(word, _)| *word)) {
                Some(meant) => format!("did you mean \"{meant}\"?"),
                None => format!("write one of {known}"),
            };
            self.error(key, format!("\"{text}\" is none of {known}"), suggestion);
        }
        found
    }

    /// Text that `parse` makes a value of, or says what is wrong with it and the way out.
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
        let strangers: Vec<(String, Place)> = self
            .entries
            .iter()
            .filter(|(key, _)| !self.asked.contains(*key))
            .map(|(key, entry)| (key.clone(), entry.place))
            .collect();
        for (key, place) in strangers {
            self.stranger(&key, place);
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
        self.asked.insert(key.to_string());
        let entry = self.entries.get(key)?;
        let value = read(entry);
        if value.is_none() {
            let message = format!("{} is {}", entry.typed, kind(&entry.value));
            self.error(key, message, format!("write {expected}"));
        }
        value
    }

    fn error(&mut self, key: &str, message: String, suggestion: String) {
        let place = self.entries.get(key).map_or(Place::Default, |entry| entry.place);
        self.unreadable.insert(key.to_string());
        self.errors.push(ConfigError { key: key.into(), place, message, suggestion });
    }

    /// Says what is wrong with a key that nobody asked for.
    fn stranger(&mut self, key: &str, place: Place) {
        let inside = format!("{key}.");
        if self.asked.iter().any(|known| known.starts_with(&inside)) {
            // A section may stand empty.
            if self.entries[key].value != Value::Section {
                let message = format!("{key} is a section, not a value");
                self.error(key, message, format!("write [{key}] and its keys below"));
            }
            return;
        }
        let sections: BTreeSet<&str> = self.asked.iter().map(|known| section(known)).collect();
        match section(key) {
            // An empty table at the top.
            "" if self.entries[key].value == Value::Section => self.no_section(key, place),
            home if sections.contains(home) => self.no_key(key),
            home => self.no_section(home, place),
        }
    }

    /// One mistake, however many keys it has.
    fn no_section(&mut self, typed: &str, place: Place) {
        let sections: BTreeSet<&str> = self.asked.iter().map(|known| section(known)).collect();
        let known: Vec<&str> = sections.into_iter().filter(|section| !section.is_empty()).collect();
        let suggestion = match nearest(typed, known.iter().copied()) {
            Some(meant) => format!("did you mean [{meant}]?"),
            None => format!("there are {}", known.join(", ")),
        };
        match self.errors.iter_mut().find(|error| error.key == typed) {
            Some(error) => error.place = error.place.min(place),
            None => {
                let message = "no such section".into();
                self.errors.push(ConfigError { key: typed.into(), place, message, suggestion });
            }
        }
    }

    fn no_key(&mut self, key: &str) {
        let home = section(key);
        let siblings: Vec<&str> = self
            .asked
            .iter()
            .filter(|known| section(known) == home)
            .map(|known| last(known))
            .collect();
        let suggestion = match self.meant(key) {
            _ if last(key) == "accumulation" => {
                "it follows from global_batch = micro_batch × accumulation × data".into()
            }
            Some(meant) => {
                self.unreadable.insert(meant.clone());
                format!("did you mean {meant}?")
            }
            None => format!("there are {}", siblings.join(", ")),
        };
        self.error(key, "no such key".into(), suggestion);
    }

    /// The key that was likely typed: one of the same section first, then one of any.
    fn meant(&self, key: &str) -> Option<String> {
        let at_home = |known: &&String| section(known) == section(key);
        let among = |keys: Vec<&String>| -> Option<String> {
            let name = nearest(last(key), keys.iter().map(|known| last(known)))?;
            keys.iter().find(|known| last(known) == name).map(|known| known.to_string())
        };
        among(self.asked.iter().filter(at_home).collect())
            .or_else(|| among(self.asked.iter().collect()))
    }
}

fn finite(value: &Value) -> Option<f64> {
    match value {
        Value::Integer(integer) => Some(*integer as f64),
        Value::Float(float) => Some(*float).filter(|float| float.is_finite()),
        _ => None,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Integer(integer) if *integer < 0 => "negative",
        Value::Integer(_) => "a whole number",
        Value::Float(float) if float.is_nan() => "not a number",
        Value::Float(float) if float.is_infinite() => "without bounds",
        Value::Float(_) => "a number with a fraction",
        Value::Flag(_) => "a truth value",
        Value::Text(_) => "text",
        Value::List(_) => "a list",
        Value::Section | Value::Sections => "a section",
        Value::Date => "a date",
    }
}

/// `model.rope_scaling` of `model.rope_scaling.factor`.
fn section(key: &str) -> &str {
    key.rsplit_once('.').map_or("", |(section, _)| section)
}

fn last(key: &str) -> &str {
    key.rsplit_once('.').map_or(key, |(_, last)| last)
}
