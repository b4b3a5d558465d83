//! The mistakes found so far.

use crate::config::Config;
use crate::error::{ConfigError, Place};

/// The largest size that is taken for meant.
pub(super) const MOST: usize = 1_000_000_000;

/// Whether all are sizes to go on with; those that are not have been noted.
pub(super) fn sized(sizes: &[usize]) -> bool {
    sizes.iter().all(|size| (1..=MOST).contains(size))
}

pub(super) struct Findings<'c> {
    pub config: &'c Config,
    mistakes: Vec<ConfigError>,
}

impl<'c> Findings<'c> {
    pub fn new(config: &'c Config) -> Findings<'c> {
        Findings { config, mistakes: config.mistakes.clone() }
    }

    /// Whether the text could be taken apart at all.
    pub fn readable(&self) -> bool {
        self.mistakes.iter().all(|mistake| !mistake.key.is_empty())
    }

    pub fn is_empty(&self) -> bool {
        self.mistakes.is_empty()
    }

    pub fn count(&self) -> usize {
        self.mistakes.len()
    }

    /// In the order of the file.
    pub fn all(mut self) -> Vec<ConfigError> {
        self.mistakes.sort_by_key(|mistake| mistake.place);
        self.mistakes
    }

    /// Notes a mistake of `keys` together, under the first of them that was typed. Nothing is said about a
    /// key whose value could not be read: its default is not what was meant.
    pub fn add(&mut self, keys: &[&str], what: String, way_out: impl Into<String>) {
        if keys.iter().any(|key| self.config.doubtful.contains(*key)) {
            return;
        }
        let place = |key: &str| self.config.places.get(key).copied();
        let key = keys.iter().find(|key| place(key).is_some()).unwrap_or(&keys[0]);
        let place = place(key).unwrap_or(Place::Untyped);
        self.mistakes.push(ConfigError {
            key: key.to_string(),
            place,
            what,
            way_out: way_out.into(),
        });
    }

    /// Notes a mistake where `good` does not hold.
    pub fn require(&mut self, good: bool, key: &str, value: impl std::fmt::Display, way_out: &str) {
        if !good {
            let name = key.rsplit('.').next().unwrap_or(key);
            self.add(&[key], format!("{name}={value} cannot be"), way_out);
        }
    }

    pub fn at_least_one(&mut self, key: &str, value: usize) {
        self.require(value >= 1, key, value, "it must be at least 1");
        // Sums of a few such numbers' products stay far from overflow.
        self.require(value <= MOST, key, value, "that is more than can be meant");
    }
}
