//! What a run file means: every default filled in, everything derived. Made by `Plan::resolve` and written
//! to `plan.json`.

use crate::config::{Compression, Recompute};
use crate::context::{self, ContextKind, Run};
use crate::learning_rate::LearningRate;
use crate::mesh::{Axis, Mesh};
use crate::model::{Part, Shape};
use crate::placement;
use crate::resolve::Environment;
use crate::schedule::{Schedule, ScheduleKind};
use lockstep_types::Dtype;
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
    /// Damaged samples that the run leaves out and counts; one more ends it.
    #[serde(default = "Data::max_corrupt")]
    pub max_corrupt: usize,
}

impl Data {
    /// A rotten spot costs the samples that touch it, once an epoch; a file with many is better prepared anew.
    pub(crate) const MAX_CORRUPT: usize = 100;

    /// Of plans from before it could be said.
    fn max_corrupt() -> usize {
        Data::MAX_CORRUPT
    }
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
    /// ZeRO's stage.
    pub zero: u8,
    /// Ranks among which ZeRO cuts states; the others hold copies.
    pub shard: usize,
    /// Whether ZeRO-3 keeps what it gathered for the forward pass.
    pub keep_gathered: bool,
    pub tensor: usize,
    /// Whether ranks of the tensor axis cut norms and residuals too, by tokens.
    pub sequence: bool,
    pub context: usize,
    pub context_kind: ContextKind,
    pub pipe: usize,
    pub schedule: ScheduleKind,
    /// Stages of each rank.
    pub chunks: usize,
    pub expert: usize,
    pub recompute: Recompute,
    /// The axes from the outermost to the innermost, whose ranks are neighbours.
    pub order: [Axis; 4],
}

/// The numbers in which the model computes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Precision {
    pub compute: Dtype,
    /// In which gradients of parameters are kept and summed, over micro-batches and over ranks. In bf16 each sum is
    /// rounded to 8 bits: what is smaller than 1/256 of what is there already gets lost, so that many micro-batches
    /// of a step lose more. Plans from before it could be said have f32.
    #[serde(default)]
    pub gradients: Dtype,
}

/// What ranks may expect of each other.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Comm {
    pub timeout_s: f64,
    /// Minimum size of a gradient bucket.
    pub bucket_bytes: usize,
    pub overlap: Overlap,
    /// Plans from before there was any have none.
    #[serde(default)]
    pub compression: Compression,
    /// Steps at the start in which gradients travel whole all the same: where only the largest are to be sent.
    #[serde(default)]
    pub compression_warmup: usize,
}

/// Which communication overlaps with compute.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Overlap {
    /// Gradient reductions during the backward pass, and ZeRO-3 gathers one block ahead.
    pub data: bool,
    /// With sequence parallelism, rows of the residual stream while others are multiplied.
    pub tensor: bool,
}

impl Overlap {
    /// The value of `comm.overlap`, or its default. Ranks of one host move data with the cores that compute, so there
    /// overlap gains nothing: by default communication overlaps where it crosses hosts or is offloaded.
    pub fn resolve(typed: Option<bool>, mesh: &Mesh, env: &Environment) -> Overlap {
        let data = env.offloaded_comm || env.ranks > env.local_ranks;
        let tensor = placement::crosses_hosts(mesh, Axis::Tensor, env.local_ranks);
        Overlap { data: typed.unwrap_or(data), tensor: typed.unwrap_or(tensor) }
    }
}

/// How often to save, and how many to keep.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Steps between two; 0: only at the end.
    pub every: usize,
    /// How many stay; 0: all.
    pub keep: usize,
    /// Besides, every step that is a multiple of this stays for good; 0: none.
    #[serde(default)]
    pub keep_every: usize,
}

impl Plan {
    /// The learning rate of a step, counted from 1.
    pub fn lr(&self, step: usize) -> f64 {
        self.train.lr.at(step)
    }

    /// The form in which the gradients of a step, counted from 1, travel. A replica alone sends none.
    pub fn compression(&self, step: usize) -> Compression {
        let whole = step <= self.comm.compression_warmup || self.mesh().replicas() == 1;
        if whole { Compression::None } else { self.comm.compression }
    }

    /// How much of the first moment a step, counted from 1, keeps.
    ///
    /// Of the gradients that top-k sends, each comes as the sum of those that had to wait, so that they are averaged
    /// before they arrive. A moment on top of that keeps pushing when what it is made of is long past (Lin et al.,
    /// Deep Gradient Compression: the staleness that their momentum factor masking takes away). So the moment
    /// reaches over as many *arrivals* of an element as come in the steps that it would reach over: with a
    /// fraction f, f/(1 - β₁) of them instead of 1/(1 - β₁), and no further than the last where that is less
    /// than one.
    ///
    /// ```
    /// use lockstep_plan::{Config, Plan, Environment};
    ///
    /// let beta1 = |how: &str| {
    ///     let sets = ["model.vocab=512", "layout.data=2", "comm.compression_warmup=5"].map(String::from);
    ///     let config = Config::parse(&format!("[comm]\ncompression = \"{how}\""), &sets);
    ///     let plan = Plan::resolve(&config, &Environment::one_host(2, 1)).unwrap();
    ///     [plan.beta1(5), plan.beta1(6)]
    /// };
    /// assert_eq!(beta1("topk:0.01"), [0.9, 0.0]);
    /// assert_eq!(beta1("topk:1"), [0.9, 0.9]);
    /// ```
    pub fn beta1(&self, step: usize) -> f64 {
        let [beta1, _] = self.train.betas;
        match self.compression(step) {
            Compression::TopK(fraction) => (1.0 - (1.0 - beta1) / fraction).max(0.0),
            _ => beta1,
        }
    }

    /// Where the ranks stand.
    pub fn mesh(&self) -> Mesh {
        self.layout.mesh(&self.model)
    }

    /// What a rank holds of the model.
    pub fn part(&self, rank: usize) -> Part {
        let mesh = self.mesh();
        Part::new(&mesh, mesh.coord(rank), self.layout.chunks, self.model.blocks())
    }

    /// The positions of each sequence that a rank works on.
    pub fn runs(&self, rank: usize) -> Vec<Run> {
        let mesh = self.mesh();
        let degrees = (mesh.ulysses, mesh.context / mesh.ulysses);
        context::runs(self.layout.context_kind, self.data.seq, degrees, mesh.coord(rank).context)
    }

    /// What the stages do in one optimizer step. A model on one stage is a pipeline of one.
    pub fn schedule(&self) -> Schedule {
        let Layout { schedule, pipe, chunks, .. } = self.layout;
        let kind = if pipe == 1 { ScheduleKind::OneForwardOneBackward } else { schedule };
        Schedule::new(kind, pipe, chunks, self.train.accumulation)
            .expect("a plan has a schedule that exists: it was tried when the plan was made")
    }

    /// Sequences of a replica per optimizer step.
    pub fn local_batch(&self) -> usize {
        self.train.micro_batch * self.train.accumulation
    }

    /// The first sample, of a step's global batch, of a micro-batch of the replica at `data` on its axis.
    pub fn first_sample(&self, data: usize, micro: usize) -> usize {
        data * self.local_batch() + micro * self.train.micro_batch
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
