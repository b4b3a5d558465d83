//! `[train]`: steps, batch sizes, optimizer, evaluation.

use super::Reader;
use serde::{Deserialize, Serialize};

/// `[train]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Train {
    pub steps: Option<usize>,
    /// Sequences per optimizer step, independent of the layout.
    pub global_batch: Option<usize>,
    /// Sequences per forward pass of one rank.
    pub micro_batch: Option<usize>,
    pub lr: Option<f64>,
    pub min_lr: Option<f64>,
    /// Steps of linear warm-up.
    pub warmup: Option<usize>,
    pub schedule: Option<Curve>,
    /// Fraction of the steps in which `wsd` decays.
    pub decay: Option<f64>,
    pub betas: Option<[f64; 2]>,
    pub eps: Option<f64>,
    pub weight_decay: Option<f64>,
    /// Maximum gradient norm; 0: no clipping.
    pub clip: Option<f64>,
    pub seed: Option<usize>,
    /// Steps between evaluations; 0: none.
    pub eval_every: Option<usize>,
    /// Global batches per evaluation.
    pub eval_batches: Option<usize>,
    pub log_every: Option<usize>,
    /// Compute threads per rank.
    pub threads: Option<usize>,
    /// Prompt for a text sample after training.
    pub sample: Option<String>,
    pub sample_tokens: Option<usize>,
}

/// Learning rate after the warm-up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Curve {
    Constant,
    Linear,
    Cosine,
    /// Warm-up, stable, decay (MiniCPM): constant, then linear decay over the last `decay` fraction of the steps.
    Wsd,
}

const CURVES: [(&str, Curve); 4] = [
    ("cosine", Curve::Cosine),
    ("linear", Curve::Linear),
    ("wsd", Curve::Wsd),
    ("constant", Curve::Constant),
];

impl Train {
    pub(super) fn read(reader: &mut Reader) -> Train {
        Train {
            steps: reader.count("train.steps"),
            global_batch: reader.count("train.global_batch"),
            micro_batch: reader.count("train.micro_batch"),
            lr: reader.number("train.lr"),
            min_lr: reader.number("train.min_lr"),
            warmup: reader.count("train.warmup"),
            schedule: reader.word("train.schedule", &CURVES),
            decay: reader.number("train.decay"),
            betas: reader.pair("train.betas"),
            eps: reader.number("train.eps"),
            weight_decay: reader.number("train.weight_decay"),
            clip: reader.number("train.clip"),
            seed: reader.count("train.seed"),
            eval_every: reader.count("train.eval_every"),
            eval_batches: reader.count("train.eval_batches"),
            log_every: reader.count("train.log_every"),
            threads: reader.count("train.threads"),
            sample: reader.text("train.sample"),
            sample_tokens: reader.count("train.sample_tokens"),
        }
    }
}
