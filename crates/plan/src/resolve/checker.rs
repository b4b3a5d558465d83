//! Collects the errors of a config while it is resolved.

use crate::config::Config;
use crate::error::{ConfigError, Place};
pub(super) use crate::model::MAX_SIZE as MOST;

/// Whether all sizes are in range. Sizes that are not have been reported by `Checker::at_least_one`.
pub(super) fn sized(sizes: &[usize]) -> bool {
    sizes.iter().all(|size| (1..=MOST).contains(size))
}

pub(super) struct Checker<'c> {
    pub config: &'c Config,
    errors: Vec<ConfigError>,
}

impl<'c> Checker<'c> {
    pub fn new(config: &'c Config) -> Checker<'c> {
        Checker { config, errors: config.errors.clone() }
    }

    /// Whether the text is valid TOML.
    pub fn readable(&self) -> bool {
        self.errors.iter().all(|error| !error.key.is_empty())
    }

    pub fn is_empty(&self) -> bool {
        self.errors.is_empty()
    }

    pub fn count(&self) -> usize {
        self.errors.len()
    }

    /// All errors, in the order of the file.
    pub fn all(mut self) -> Vec<ConfigError> {
        self.errors.sort_by_key(|error| error.place);
        self.errors
    }

    /// Adds an error about `keys`, listed under the first of them that is set. Does nothing if the value of one of
    /// them could not be read, because its default is not what the user meant.
    pub fn add(&mut self, keys: &[&str], message: String, suggestion: impl Into<String>) {
        if keys.iter().any(|key| self.config.unreadable.contains(*key)) {
            return;
        }
        let place = |key: &str| self.config.places.get(key).copied();
        let key = keys.iter().find(|key| place(key).is_some()).unwrap_or(&keys[0]);
        let place = place(key).unwrap_or(Place::Default);
        self.errors.push(ConfigError {
            key: key.to_string(),
            place,
            message,
            suggestion: suggestion.into(),
        });
    }

    /// Adds the error `{key} must {expected} (got {value})` unless `valid`.
    pub fn require(
        &mut self,
        valid: bool,
        key: &str,
        value: impl std::fmt::Display,
        expected: &str,
    ) {
        if !valid {
            let name = key.rsplit('.').next().unwrap_or(key);
            self.add(&[key], format!("{name} must {expected} (got {value})"), "");
        }
    }

    pub fn at_least_one(&mut self, key: &str, value: usize) {
        self.within(key, value, MOST);
    }

    /// Requires a value from 1 to `most`.
    pub fn within(&mut self, key: &str, value: usize, most: usize) {
        self.require(value >= 1, key, value, "be a positive integer");
        self.require(value <= most, key, value, &format!("be at most {most}"));
    }
}
