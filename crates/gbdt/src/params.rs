//! Training parameters: what the user typed, with defaults, and their validation.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Parameters of a training. Names and defaults follow XGBoost where it has the parameter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Params {
    pub objective: Objective,
    /// Number of classes of `softmax`.
    pub classes: usize,
    /// Quantile of the objective `quantile`, between 0 and 1.
    pub quantile: f64,
    /// Number of boosting rounds. A round has one tree, or one per class.
    pub rounds: usize,
    /// Learning rate.
    pub eta: f64,
    pub grow: Growth,
    /// Largest depth of a tree; 0 for no limit.
    pub max_depth: usize,
    /// Largest number of leaves of a tree; 0 for no limit.
    pub max_leaves: usize,
    /// Smallest sum of hessians of a child.
    pub min_child_weight: f64,
    /// Smallest gain of a split.
    pub gamma: f64,
    /// L2 regularization of leaf values.
    pub lambda: f64,
    /// L1 regularization of leaf values.
    pub alpha: f64,
    /// Largest number of bins of a feature, including the one of missing values.
    pub max_bin: usize,
    /// Fraction of rows that a tree uses.
    pub subsample: f64,
    /// Fraction of columns that a tree, a level of it or a node of it uses.
    pub colsample_bytree: f64,
    pub colsample_bylevel: f64,
    pub colsample_bynode: f64,
    /// Monotone constraints by feature name: 1 (increasing), -1 (decreasing).
    pub monotone: std::collections::BTreeMap<String, i8>,
    /// Weight of the positive class of `logistic`.
    pub scale_pos_weight: f64,
    /// Prediction before the first tree, in the space of the output (a probability for `logistic`). Default: estimated
    /// from the labels.
    pub base_score: Option<f64>,
    /// Metrics. Default: that of the objective.
    pub metrics: Vec<String>,
    /// Stops when the first metric of the last evaluation set has not improved for this many rounds; 0 never stops.
    pub early_stopping: usize,
    pub seed: u64,
}

impl Default for Params {
    fn default() -> Params {
        Params {
            objective: Objective::SquaredError,
            classes: 0,
            quantile: 0.5,
            rounds: 100,
            eta: 0.3,
            grow: Growth::Depth,
            max_depth: 6,
            max_leaves: 0,
            min_child_weight: 1.0,
            gamma: 0.0,
            lambda: 1.0,
            alpha: 0.0,
            max_bin: 256,
            subsample: 1.0,
            colsample_bytree: 1.0,
            colsample_bylevel: 1.0,
            colsample_bynode: 1.0,
            monotone: Default::default(),
            scale_pos_weight: 1.0,
            base_score: None,
            metrics: Vec::new(),
            early_stopping: 0,
            seed: 0,
        }
    }
}

/// The order in which nodes are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Growth {
    /// All nodes of a level.
    Depth,
    /// The node with the highest gain.
    Loss,
}

/// The loss that is minimized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    SquaredError,
    Logistic,
    Softmax,
    Poisson,
    AbsoluteError,
    Quantile,
    /// LambdaMART with NDCG.
    Rank,
}

impl Objective {
    pub const ALL: [Objective; 7] = [
        Objective::SquaredError,
        Objective::Logistic,
        Objective::Softmax,
        Objective::Poisson,
        Objective::AbsoluteError,
        Objective::Quantile,
        Objective::Rank,
    ];

    /// Name in XGBoost's model files.
    pub fn xgboost_name(self) -> &'static str {
        match self {
            Objective::SquaredError => "reg:squarederror",
            Objective::Logistic => "binary:logistic",
            Objective::Softmax => "multi:softprob",
            Objective::Poisson => "count:poisson",
            Objective::AbsoluteError => "reg:absoluteerror",
            Objective::Quantile => "reg:quantileerror",
            Objective::Rank => "rank:ndcg",
        }
    }

    /// The objective that predicts in the same way as one of XGBoost's.
    pub fn from_xgboost(name: &str) -> Option<Objective> {
        Some(match name {
            "reg:logistic" => Objective::Logistic,
            "multi:softmax" => Objective::Softmax,
            "reg:linear" | "reg:pseudohubererror" | "reg:squaredlogerror" => {
                Objective::SquaredError
            }
            "reg:tweedie" | "reg:gamma" => Objective::Poisson,
            "rank:pairwise" | "rank:map" => Objective::Rank,
            name => Objective::ALL.into_iter().find(|o| o.xgboost_name() == name)?,
        })
    }

    /// Name of the default metric.
    pub fn default_metric(self) -> &'static str {
        match self {
            Objective::SquaredError => "rmse",
            Objective::Logistic => "logloss",
            Objective::Softmax => "mlogloss",
            Objective::Poisson => "poisson-nloglik",
            Objective::AbsoluteError | Objective::Quantile => "mae",
            Objective::Rank => "ndcg",
        }
    }
}

/// Largest number of bins; bin numbers are 16-bit.
pub const MAX_BINS: usize = 65_535;

impl Params {
    /// Number of trees of a round.
    pub fn outputs(&self) -> usize {
        if self.objective == Objective::Softmax { self.classes } else { 1 }
    }

    /// Fails with all problems.
    pub fn check(&self) -> Result<()> {
        let mut problems = Vec::new();
        let mut require = |ok: bool, text: String| {
            if !ok {
                problems.push(text);
            }
        };
        let fractions = [
            ("subsample", self.subsample),
            ("colsample_bytree", self.colsample_bytree),
            ("colsample_bylevel", self.colsample_bylevel),
            ("colsample_bynode", self.colsample_bynode),
        ];
        for (name, value) in fractions {
            let ok = value > 0.0 && value <= 1.0;
            require(ok, format!("{name} must be above 0 and at most 1 (got {value})"));
        }
        let nonnegative = [
            ("min_child_weight", self.min_child_weight),
            ("gamma", self.gamma),
            ("lambda", self.lambda),
            ("alpha", self.alpha),
        ];
        for (name, value) in nonnegative {
            let ok = value >= 0.0 && value.is_finite();
            require(ok, format!("{name} must be 0 or larger (got {value})"));
        }
        let eta = self.eta;
        require(eta > 0.0 && eta.is_finite(), format!("eta must be positive (got {eta})"));
        let scale = self.scale_pos_weight;
        let ok = scale > 0.0 && scale.is_finite();
        require(ok, format!("scale_pos_weight must be positive (got {scale})"));
        require(
            (2..=MAX_BINS).contains(&self.max_bin),
            format!("max_bin must be from 2 to {MAX_BINS} (got {})", self.max_bin),
        );
        require(
            self.quantile > 0.0 && self.quantile < 1.0,
            format!("quantile must be between 0 and 1 (got {})", self.quantile),
        );
        require(
            self.objective != Objective::Softmax || self.classes >= 2,
            format!("objective softmax needs classes, at least 2 (got {})", self.classes),
        );
        require(
            self.objective == Objective::Softmax || self.classes <= 1,
            format!("classes={} needs the objective softmax", self.classes),
        );
        require(
            self.max_depth > 0 || self.max_leaves > 0,
            "max_depth=0 (no limit) needs max_leaves".to_string(),
        );
        require(
            self.max_depth <= 30,
            format!("max_depth must be at most 30 (got {})", self.max_depth),
        );
        require(
            self.max_leaves != 1,
            "max_leaves must be 0 (no limit) or at least 2 (got 1)".to_string(),
        );
        for (name, direction) in &self.monotone {
            require(
                (-1..=1).contains(direction),
                format!("monotone.{name} must be -1, 0 or 1 (got {direction})"),
            );
        }
        for name in &self.metrics {
            if let Err(what) = crate::metric::Metric::parse(name) {
                require(false, what);
            }
        }
        if let Some(score) = self.base_score {
            let ok = match self.objective {
                Objective::Logistic => score > 0.0 && score < 1.0,
                Objective::Poisson => score > 0.0 && score.is_finite(),
                _ => score.is_finite(),
            };
            let range = match self.objective {
                Objective::Logistic => "between 0 and 1",
                Objective::Poisson => "positive",
                _ => "finite",
            };
            require(ok, format!("base_score must be {range} (got {score})"));
        }
        if problems.is_empty() { Ok(()) } else { Err(Error::Params(problems)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid() {
        Params::default().check().unwrap();
    }

    #[test]
    fn all_problems_are_reported_together() {
        let params = Params { eta: 0.0, max_bin: 1, subsample: 2.0, ..Params::default() };
        let text = params.check().unwrap_err().to_string();
        assert!(text.starts_with("3 errors:"), "{text}");
        assert!(text.contains("eta must be positive (got 0)"), "{text}");
    }
}
