//! What a run file means: every default filled in, everything derived. Made by `Plan::resolve` and written
//! to `plan.json`.

use crate::config::{Compression, Compute, Recompute};
use crate::learning_rate::LearningRate;
use crate::model::Shape;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A run with every default filled in.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Also the run folder's.
    pub name: String,
    pub ranks: usize,
    pub model: Shape,
    pub data: Data,
    pub train: Train,
    pub layout: Layout,
    pub precision: Precision,
    pub comm: Comm,
    pub checkpoint: Checkpoint,
}

/// What is learned from.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Data {
    pub source: Source,
    /// Tokens of a training sequence; at most the model's.
    pub seq: usize,
    /// Fraction kept for evaluation.
    pub held_out: f64,
}

/// Where tokens come from. Written as it is typed: `builtin:grammar`, or a path.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Source {
    /// Made by the program.
    Builtin(String),
    /// A token file.
    File(PathBuf),
}

/// How the training goes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Train {
    pub steps: usize,
    /// Sequences per optimizer step: `micro_batch × accumulation × data`.
    pub global_batch: usize,
    /// Sequences per forward pass of a rank.
    pub micro_batch: usize,
    /// Forward passes of a rank per optimizer step.
    pub accumulation: usize,
    pub lr: LearningRate,
    pub betas: [f64; 2],
    pub eps: f64,
    pub weight_decay: f64,
    /// Largest norm of the gradient.
    pub clip: Option<f64>,
    pub seed: u64,
    /// None when nothing is held out.
    pub eval: Option<Eval>,
    pub log_every: usize,
    /// Of each rank.
    pub threads: usize,
    pub sample: Option<Sample>,
}

/// When to look at held-out data, and at how much.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Eval {
    /// Steps between two; 0: only at the end.
    pub every: usize,
    /// Global batches in each.
    pub batches: usize,
}

/// Text to make when the training is over.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Sample {
    pub prompt: String,
    pub tokens: usize,
}

/// How the ranks share the work.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Layout {
    pub data: usize,
    pub recompute: Recompute,
}

/// The numbers in which the model computes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Precision {
    pub compute: Compute,
}

/// What ranks may expect of each other.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Comm {
    pub timeout_s: f64,
    pub bucket_bytes: usize,
    /// Plans from before there was any have none.
    #[serde(default)]
    pub compression: Compression,
}

/// How often to save, and how many to keep.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Steps between two; 0: only at the end.
    pub every: usize,
    /// How many stay; 0: all.
    pub keep: usize,
}

impl Plan {
    /// The learning rate of a step, counted from 1.
    pub fn lr(&self, step: usize) -> f64 {
        self.train.lr.at(step)
    }

    /// Sequences of a rank per optimizer step.
    pub fn local_batch(&self) -> usize {
        self.train.micro_batch * self.train.accumulation
    }

    /// Tokens of all ranks per optimizer step.
    pub fn tokens_per_step(&self) -> usize {
        self.train.global_batch * self.data.seq
    }
}

impl From<String> for Source {
    fn from(typed: String) -> Source {
        match typed.strip_prefix("builtin:") {
            Some(name) => Source::Builtin(name.to_string()),
            None => Source::File(typed.into()),
        }
    }
}

impl From<Source> for String {
    fn from(source: Source) -> String {
        match source {
            Source::Builtin(name) => format!("builtin:{name}"),
            Source::File(path) => path.to_string_lossy().into_owned(),
        }
    }
}
