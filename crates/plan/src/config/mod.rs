//! The run file as typed, with `--set` overrides. Knows keys and their types. Defaults and checks across keys belong
//! to `Plan::resolve`.

mod checkpoint;
mod comm;
mod data;
mod device;
mod entries;
mod layout;
pub(crate) mod model;
mod nearest;
mod precision;
mod reader;
mod trace;
mod train;

pub use checkpoint::Checkpoint;
pub use comm::{Comm, Compression, ParseCompressionError};
pub use data::Data;
pub use device::{Device, DeviceKind};
pub use layout::{Layout, Offload, Recompute};
pub use model::{Model, RopeScaling};
pub use nearest::nearest;
pub use precision::{Fp8, Fp8Scaling, Precision};
pub(crate) use reader::Reader;
pub use trace::{Trace, TraceSteps};
pub use train::{Curve, Train};

use crate::error::{ConfigError, Place};
use std::collections::{BTreeMap, BTreeSet};

/// Values of a run file; a key that is not set is `None`.
///
/// ```
/// use lockstep_plan::Config;
/// let config = Config::parse("[model]\ndim = 64", &["train.lr=1e-3".into()]);
/// assert_eq!(config.model.dim, Some(64));
/// assert_eq!(config.train.lr, Some(1e-3));
/// assert!(config.errors.is_empty());
/// ```
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Config {
    pub name: Option<String>,
    pub model: Model,
    /// The model of the checkpoint that a run starts from, if any. `model` overrides it.
    pub base: Model,
    pub data: Data,
    pub train: Train,
    pub layout: Layout,
    pub precision: Precision,
    pub device: Device,
    pub comm: Comm,
    pub checkpoint: Checkpoint,
    pub trace: Trace,
    /// Where each key was set, so that later errors can name its line.
    pub places: BTreeMap<String, Place>,
    /// Syntax and type errors. `Plan::resolve` returns these together with its own, so that all are reported at once.
    pub errors: Vec<ConfigError>,
    /// Keys whose value could not be read. No further errors are reported for their defaults.
    pub(crate) unreadable: BTreeSet<String>,
}

impl Config {
    /// Parses a run file and the `section.key=value` of each `--set`, of which the last wins.
    pub fn parse(text: &str, sets: &[String]) -> Config {
        let mut reader = match Reader::new(text, sets) {
            Ok(reader) => reader,
            Err(errors) => return Config { errors, ..Config::default() },
        };
        let mut config = Config {
            name: reader.text("name"),
            model: Model::read(&mut reader, "model"),
            data: Data::read(&mut reader),
            train: Train::read(&mut reader),
            layout: Layout::read(&mut reader),
            precision: Precision::read(&mut reader),
            device: Device::read(&mut reader),
            comm: Comm::read(&mut reader),
            checkpoint: Checkpoint::read(&mut reader),
            trace: Trace::read(&mut reader),
            ..Config::default()
        };
        let finished = reader.finish();
        config.places = finished.places;
        config.errors = finished.errors;
        config.unreadable = finished.unreadable;
        config
    }

    /// Replaces the layout by `words`, separated by spaces or commas: `tensor=2 sequence=true`. The axes of a placement
    /// are separated in the same way: `placement=pipe,data,context,tensor`.
    ///
    /// ```
    /// use lockstep_plan::Config;
    /// let config = Config::parse("[layout]\ndata = 4\nzero = 1", &[]).with_layout("data=2 pipe=2");
    /// assert_eq!((config.layout.data, config.layout.pipe, config.layout.zero), (Some(2), Some(2), None));
    /// assert_eq!(config.ranks(), 4);
    /// ```
    pub fn with_layout(&self, words: &str) -> Config {
        let own = |key: &str| key.starts_with("layout.");
        let mut config = self.clone();
        config.places.retain(|key, _| !own(key));
        config.unreadable.retain(|key| !own(key));
        let words = join_placement(words);
        config.errors.extend(words.iter().filter(|word| !word.contains('=')).map(|word| {
            ConfigError {
                key: "layout".into(),
                place: Place::Layouts,
                message: format!("`{word}` has no `=`"),
                suggestion: "write for example tensor=2".into(),
            }
        }));
        let sets = words.iter().filter(|word| word.contains('='));
        let typed = Config::parse("", &sets.map(|set| format!("layout.{set}")).collect::<Vec<_>>());
        let here = |error| ConfigError { place: Place::Layouts, ..error };
        config.errors.extend(typed.errors.into_iter().map(here));
        config.places.extend(typed.places.into_keys().map(|key| (key, Place::Layouts)));
        config.unreadable.extend(typed.unreadable);
        config.layout = typed.layout;
        config
    }

    /// Number of ranks of the layout, used if the command line does not set it.
    pub fn ranks(&self) -> usize {
        self.layout.ranks()
    }

    /// The data source. Needed before the plan, which depends on the vocabulary of the data.
    pub fn source(&self) -> &str {
        self.data.source.as_deref().unwrap_or("builtin:grammar")
    }

    /// The fraction reserved for evaluation. Needed before the plan, because the data is opened first.
    pub fn held_out(&self) -> f64 {
        self.data.held_out.unwrap_or(0.05)
    }
}

/// The words of a layout. Words after `placement=` that have no `=` belong to its value, with or without quotes.
fn join_placement(words: &str) -> Vec<String> {
    let mut joined: Vec<String> = Vec::new();
    let words = words.split(|c: char| c == ',' || c.is_whitespace());
    for word in words.filter(|word| !word.is_empty()) {
        match joined.last_mut().filter(|last| last.starts_with("placement=")) {
            Some(last) if !word.contains('=') => last.push_str(&format!(",{word}")),
            _ => joined.push(word.to_string()),
        }
    }
    for word in joined.iter_mut().filter(|word| word.starts_with("placement=")) {
        word.retain(|c| c != '"');
    }
    joined
}
