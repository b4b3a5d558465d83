//! The mistakes found so far.

use crate::config::Config;
use crate::error::{ConfigError, Place};

/// The largest size that is taken for meant.
pub(super) const MOST: usize = 1_000_000_000;

/// Whether all are sizes to go on with; those that are not have been noted.
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

    /// Whether the text could be taken apart at all.
    pub fn readable(&self) -> bool {
        self.errors.iter().all(|error| !error.key.is_empty())
    }

    pub fn is_empty(&self) -> bool {
        self.errors.is_empty()
    }

    pub fn count(&self) -> usize {
        self.errors.len()
    }

    /// In the order of the file.
    pub fn all(mut self) -> Vec<ConfigError> {
        self.errors.sort_by_key(|error| error.place);
        self.errors
    }

    /// Notes a mistake of `keys` together, under the first of them that was typed. Nothing is said about a
    /// key whose value could not be read: its default is not what was meant.
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

    /// Notes a mistake where `good` does not hold.
    pub fn require(
        &mut self,
        good: bool,
        key: &str,
        value: impl std::fmt::Display,
        suggestion: &str,
    ) {
        if !good {
            let name = key.rsplit('.').next().unwrap_or(key);
            self.add(&[key], format!("{name}={value} cannot be"), suggestion);
        }
    }

    pub fn at_least_one(&mut self, key: &str, value: usize) {
        self.require(value >= 1, key, value, "it must be at least 1");
        // Sums of a few such numbers' products stay far from overflow.
        self.require(value <= MOST, key, value, "that is more than can be meant");
    }
}
