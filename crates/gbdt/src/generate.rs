//! Generated data with a known optimal loss: labels are random with a known probability, so no model has a lower expected
//! loss than the entropy. A row is a function of (seed, row number), the same on any rank.

use lockstep_kernels::RandomKey;
use serde::{Deserialize, Serialize};

use crate::data::Table;
use crate::objective::sigmoid;

/// Size and seed of generated data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Generate {
    /// Rows of the training data.
    pub rows: usize,
    /// Rows of the evaluation set `valid`; 0 for none.
    pub eval_rows: usize,
    /// Number of features, at least 4. Only the first four matter.
    pub features: usize,
    /// Fraction of missing values.
    pub missing: f64,
    pub seed: u64,
}

impl Default for Generate {
    fn default() -> Generate {
        Generate { rows: 20_000, eval_rows: 5_000, features: 8, missing: 0.0, seed: 1 }
    }
}

impl Generate {
    /// Some rows of the endless data. Evaluation rows follow the training rows.
    pub fn table(&self, rows: std::ops::Range<usize>) -> Table {
        let features = self.features.max(4);
        let mut values = Vec::with_capacity(rows.len() * features);
        let mut label = Vec::with_capacity(rows.len());
        for row in rows {
            let x = self.features_of(row);
            let uniform = self.uniform(1, row as u64);
            label.push(f32::from(u8::from(uniform < probability(&x))));
            for (feature, x) in x.iter().enumerate() {
                let index = (row * features + feature) as u64;
                let missing =
                    self.missing > 0.0 && f64::from(self.uniform(2, index)) < self.missing;
                values.push(if missing { f32::NAN } else { *x });
            }
        }
        Table::dense(Table::numbered(features), values, label)
    }

    /// Mean entropy of the labels of some rows, in nats: the lowest expected log loss if no value is missing.
    pub fn entropy(&self, rows: std::ops::Range<usize>) -> f64 {
        let entropy = |p: f64| -(p * p.ln() + (1.0 - p) * (1.0 - p).ln());
        self.mean(rows, |_, p| entropy(p))
    }

    /// Log loss of the true probabilities on the labels of some rows. It differs from the entropy by chance; a model has a
    /// lower loss on these rows only by chance.
    pub fn true_logloss(&self, rows: std::ops::Range<usize>) -> f64 {
        self.mean(rows, |row, p| {
            let label = self.uniform(1, row as u64) < p as f32;
            -(if label { p } else { 1.0 - p }).ln()
        })
    }

    /// Mean of a function of the row and the probability of label 1.
    fn mean(&self, rows: std::ops::Range<usize>, of: impl Fn(usize, f64) -> f64) -> f64 {
        let count = rows.len().max(1) as f64;
        let each = rows.map(|row| of(row, f64::from(probability(&self.features_of(row)))));
        each.sum::<f64>() / count
    }

    fn features_of(&self, row: usize) -> Vec<f32> {
        let features = self.features.max(4);
        (0..features).map(|feature| self.uniform(0, (row * features + feature) as u64)).collect()
    }

    fn uniform(&self, stream: u64, index: u64) -> f32 {
        RandomKey { seed: self.seed, stream }.word(index) as f32 / 4_294_967_296.0
    }
}

/// Probability of label 1: a step, a slope and an interaction.
fn probability(x: &[f32]) -> f32 {
    let step = if x[0] > 0.6 { 2.0 } else { -1.0 };
    let interaction = if x[2] > 0.5 && x[3] > 0.4 { 1.5 } else { -0.5 };
    sigmoid(step + 2.0 * (x[1] - 0.5) + interaction)
}
