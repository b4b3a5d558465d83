//! Boosting with evaluation sets and early stopping.

use std::ops::ControlFlow;

use lockstep_comm::Group;
use lockstep_kernels::Team;

use crate::error::{Error, Result};
use crate::matrix::Matrix;
use crate::metric::Metric;
use crate::model::{BinnedTree, Model};
use crate::params::Params;
use crate::train::booster::{Booster, add_tree};

/// Rows that are evaluated during training. The matrix has the cuts of the training data.
pub struct EvalSet {
    pub name: String,
    pub matrix: Matrix,
    margins: Vec<f32>,
    /// Trees that the margins contain.
    trees: usize,
}

impl EvalSet {
    pub fn new(name: impl Into<String>, matrix: Matrix) -> EvalSet {
        EvalSet { name: name.into(), matrix, margins: Vec::new(), trees: 0 }
    }

    /// Adds the trees that the margins do not contain yet.
    fn update(&mut self, team: &Team, model: &Model) {
        let rows = self.matrix.rows;
        if self.trees == 0 {
            self.margins = model.base_margins(rows);
        }
        for (tree, output) in model.trees.iter().zip(&model.output_of_tree).skip(self.trees) {
            let binned = BinnedTree::new(tree, &self.matrix.cuts);
            let margins = &mut self.margins[output * rows..][..rows];
            add_tree(team, &binned, &self.matrix, &tree.threshold, margins);
        }
        self.trees = model.trees.len();
    }
}

/// The state after a round.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Progress {
    /// Finished rounds.
    pub round: usize,
    /// Values by set and metric, such as `("valid-auc", 0.93)`; empty if the round was not evaluated.
    pub metrics: Vec<(String, f64)>,
    /// The best value of the metric of early stopping, and its round from 0.
    pub best: Option<(f64, usize)>,
}

impl Progress {
    /// Whether early stopping ends the training.
    pub fn is_over(&self, params: &Params) -> bool {
        let stopped = self.best.is_some_and(|(_, round)| {
            params.early_stopping > 0 && self.round > round + params.early_stopping
        });
        stopped || self.round >= params.rounds
    }
}

/// How often to evaluate, and on what.
pub struct Evaluation<'s> {
    pub sets: &'s mut [EvalSet],
    /// Whether to compute the metrics of the training rows as well.
    pub train: bool,
    /// Evaluates every so many rounds, and the last one.
    pub every: usize,
}

/// Called after each round; breaks to stop.
pub type AfterRound<'a> = &'a mut dyn FnMut(&Progress, &Booster<'_>) -> Result<ControlFlow<()>>;

/// Trains until `rounds`, until early stopping, or until `after_round` breaks. Starts after `progress`. Collective;
/// `after_round` must return the same on all ranks.
pub fn fit(
    group: &Group,
    team: &Team,
    booster: &mut Booster<'_>,
    (params, evaluation): (&Params, &mut Evaluation<'_>),
    (mut progress, after_round): (Progress, AfterRound<'_>),
) -> Result<Progress> {
    if params.early_stopping > 0 && evaluation.sets.is_empty() {
        return Err(Error::Input("early_stopping needs an evaluation set; set data.eval".into()));
    }
    let names = match params.metrics.is_empty() {
        true => vec![params.objective.default_metric().to_string()],
        false => params.metrics.clone(),
    };
    let metrics: Vec<(String, Metric)> = names
        .into_iter()
        .map(|name| Metric::parse(&name).map(|metric| (name, metric)).map_err(Error::Input))
        .collect::<Result<_>>()?;
    while !progress.is_over(params) {
        booster.round()?;
        progress.round += 1;
        progress.metrics.clear();
        let due = progress.round.is_multiple_of(evaluation.every.max(1))
            || progress.round == params.rounds;
        if due || params.early_stopping > 0 {
            evaluate(group, team, booster, &metrics, evaluation, &mut progress)?;
        }
        if params.early_stopping > 0
            && let Some((_, value)) = last_set_first_metric(&progress, metrics.len())
        {
            let maximized = metrics[0].1.is_maximized();
            let better = |best: f64| if maximized { value > best } else { value < best };
            if progress.best.is_none_or(|(best, _)| better(best)) {
                progress.best = Some((value, progress.round - 1));
            }
            booster.model_mut().best_round = progress.best.map(|(_, round)| round);
        }
        if after_round(&progress, booster)?.is_break() {
            break;
        }
    }
    Ok(progress)
}

/// The value that early stopping watches.
fn last_set_first_metric(progress: &Progress, metrics: usize) -> Option<(String, f64)> {
    let first = progress.metrics.len().checked_sub(metrics)?;
    progress.metrics.get(first).cloned()
}

fn evaluate(
    group: &Group,
    team: &Team,
    booster: &Booster<'_>,
    metrics: &[(String, Metric)],
    evaluation: &mut Evaluation<'_>,
    progress: &mut Progress,
) -> Result<()> {
    let objective = booster.model().objective;
    if evaluation.train {
        for (name, metric) in metrics {
            let value = metric.compute(group, booster.matrix(), objective, booster.margins())?;
            progress.metrics.push((format!("train-{name}"), value));
        }
    }
    for set in evaluation.sets.iter_mut() {
        set.update(team, booster.model());
        for (name, metric) in metrics {
            let value = metric.compute(group, &set.matrix, objective, &set.margins)?;
            progress.metrics.push((format!("{}-{name}", set.name), value));
        }
    }
    Ok(())
}
