//! Published measurements as plans: each row of a table becomes a plan, a cluster, a training program and the measured
//! values. Rows differ only in what their source states, never in constants.

#![allow(unused_imports)]

mod b200;
mod bigscience;
mod csv;
mod llama3;
mod megatron;
mod nanotron;
mod nemo;
mod qwen3;
mod torchtitan;
mod vtrain;

pub use b200::{b200, b200_others};
pub use bigscience::bigscience;
pub use csv::{Cells, read};
pub use llama3::llama3;
pub use megatron::{korthikanti, korthikanti_activations, sc21};
pub use nanotron::nanotron;
pub use nemo::nemo;
pub use qwen3::qwen3;
pub use torchtitan::torchtitan;
pub use vtrain::vtrain;

use lockstep_plan::{Config, Environment, Plan};
use lockstep_sim::{Cluster, Estimate, Options, Software, estimate};

/// A plan with its measurements.
pub struct Row {
    pub name: String,
    /// Rows of a group are compared with each other.
    pub group: String,
    pub plan: Plan,
    pub cluster: Cluster,
    pub options: Options,
    pub seconds: Option<f64>,
    /// Allocated bytes as reported by the framework.
    pub bytes: Option<f64>,
    /// Whether the run failed with out-of-memory.
    pub failed: bool,
}

impl Row {
    pub fn estimate(&self) -> Estimate {
        estimate(&self.plan, &self.cluster, &self.options)
    }
}

/// A plan on hosts of eight ranks; panics with the config errors.
pub fn plan(text: &str, ranks: usize) -> Plan {
    let env = Environment {
        ranks,
        local_ranks: ranks.min(8),
        cores: 8,
        offloaded_comm: true,
        gpu: true,
        data_vocab: None,
    };
    match Plan::resolve(&Config::parse(text, &[]), &env) {
        Ok(plan) => plan,
        Err(errors) => {
            let all: Vec<String> = errors.iter().map(ToString::to_string).collect();
            panic!("{}\n{text}", all.join("\n"));
        }
    }
}

/// A GPT-2 style model and its training settings.
pub struct Gpt {
    pub dim: usize,
    pub heads: usize,
    pub layers: usize,
    pub seq: usize,
    pub vocab: usize,
    pub dropout: f64,
}

impl Gpt {
    /// As a `[model]` section.
    pub fn model(&self) -> String {
        let Gpt { dim, heads, layers, seq, vocab, dropout } = self;
        format!(
            "[model]\nfamily = \"gpt2\"\ndim = {dim}\nheads = {heads}\nlayers = {layers}\nseq = {seq}\nvocab = {vocab}\ndropout = {dropout:?}\n"
        )
    }
}

pub fn options(software: Software) -> Options {
    Options { software, ..Options::default() }
}
