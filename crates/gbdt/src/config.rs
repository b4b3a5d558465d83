//! The file of a run: data, parameters and how the run behaves.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::data::{Format, Schema};
use crate::error::{Error, Result};
use crate::generate::Generate;
use crate::params::{Objective, Params};

/// A run file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Default: the name of the file.
    pub name: Option<String>,
    pub data: Data,
    pub trees: Params,
    pub run: Options,
}

/// Files and the roles of their columns.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Data {
    pub train: Option<PathBuf>,
    /// Evaluation sets by name. Early stopping watches the last one, in alphabetical order.
    pub eval: BTreeMap<String, PathBuf>,
    /// Generated data instead of files.
    pub generate: Option<Generate>,
    pub format: Option<Format>,
    pub label: Option<String>,
    pub weight: Option<String>,
    pub group: Option<String>,
    pub categorical: Vec<String>,
    pub ignore: Vec<String>,
    pub header: Option<bool>,
    pub separator: Option<char>,
    pub features: Option<usize>,
}

impl Data {
    pub fn schema(&self) -> Schema {
        Schema {
            label: self.label.clone(),
            weight: self.weight.clone(),
            group: self.group.clone(),
            categorical: self.categorical.clone(),
            ignore: self.ignore.clone(),
            header: self.header,
            separator: self.separator,
            features: self.features,
        }
    }
}

/// Behavior of a run that does not change the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    pub ranks: usize,
    /// Threads of each rank; 0 divides the cores between the ranks of a host.
    pub threads: usize,
    /// Rounds between two checkpoints; 0 saves only the last one.
    pub checkpoint_every: usize,
    /// Checkpoints to keep.
    pub keep: usize,
    /// Rounds between two evaluations.
    pub eval_every: usize,
    /// Whether to evaluate the training rows as well.
    pub eval_train: bool,
    /// Rounds between two lines of output.
    pub report_every: usize,
    /// Seconds after which a collective fails.
    pub timeout_s: f64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            ranks: 1,
            threads: 0,
            checkpoint_every: 0,
            keep: 2,
            eval_every: 1,
            eval_train: false,
            report_every: 10,
            timeout_s: 60.0,
        }
    }
}

impl Config {
    /// Fails with all problems.
    pub fn check(&self) -> Result<()> {
        let mut problems = match self.trees.check() {
            Err(Error::Params(problems)) => {
                problems.into_iter().map(|p| format!("trees.{p}")).collect()
            }
            _ => Vec::new(),
        };
        let mut require = |ok: bool, text: &str| {
            if !ok {
                problems.push(text.to_string());
            }
        };
        let data = &self.data;
        require(
            data.train.is_some() != data.generate.is_some(),
            "set either data.train or data.generate",
        );
        require(
            data.generate.is_none() || data.eval.is_empty(),
            "data.eval does not work with data.generate; set data.generate.eval_rows",
        );
        require(
            data.generate.is_none() || self.trees.objective == Objective::Logistic,
            "data.generate has the labels 0 and 1; set trees.objective = \"logistic\"",
        );
        if let Some(generate) = &data.generate {
            require(generate.rows > 0, "data.generate.rows must be positive (got 0)");
            let ok = (0.0..1.0).contains(&generate.missing);
            require(ok, "data.generate.missing must be at least 0 and below 1");
        }
        let sets =
            !data.eval.is_empty() || data.generate.is_some_and(|generate| generate.eval_rows > 0);
        require(
            self.trees.early_stopping == 0 || sets,
            "trees.early_stopping needs an evaluation set; set data.eval",
        );
        require(self.run.ranks > 0, "run.ranks must be positive (got 0)");
        let timeout = self.run.timeout_s;
        require(timeout > 0.0 && timeout.is_finite(), "run.timeout_s must be positive");
        if problems.is_empty() { Ok(()) } else { Err(Error::Params(problems)) }
    }
}
