//! The state of a training between two rounds.

use lockstep_comm::{BufferAccess, Collective, Group, Op, Traffic};
use lockstep_kernels::Team;

use crate::error::{Error, Result};
use crate::matrix::Matrix;
use crate::model::{BinnedTree, Model};
use crate::objective;
use crate::params::{Objective, Params};
use crate::train::exchange::{Exchange, Reduction};
use crate::train::gradient::{self, Dither, Pair};
use crate::train::grow::{Buffers, Grower};
use crate::train::leaf::{self, Output};
use crate::train::partition::Partition;
use crate::train::sample::sample_rows;

/// A training on one rank.
pub struct Booster<'a> {
    group: &'a Group,
    team: &'a Team,
    matrix: &'a Matrix,
    params: &'a Params,
    exchange: Exchange<'a>,
    /// Monotone constraint of each feature; empty without constraints.
    monotone: Vec<i8>,
    model: Model,
    /// Sum of the trees: `output * rows + row`.
    margins: Vec<f32>,
    pairs: Vec<Pair>,
    packed: Vec<i64>,
    partition: Partition,
    buffers: Buffers,
    statistics: Statistics,
}

/// Communication of the rounds so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Statistics {
    /// Histograms that were reduced.
    pub histograms: usize,
    /// Nodes whose best splits were gathered, call by call.
    pub searches: Vec<usize>,
    /// Leaves whose sums were reduced, tree by tree.
    pub leaves: Vec<usize>,
}

impl<'a> Booster<'a> {
    /// Starts a training. Collective.
    pub fn new(
        group: &'a Group,
        team: &'a Team,
        matrix: &'a Matrix,
        params: &'a Params,
    ) -> Result<Booster<'a>> {
        params.check()?;
        objective::check_labels(group, matrix, params)?;
        if matrix.total_rows == 0 {
            return Err(Error::Input("the training data has no rows".into()));
        }
        let base_score = objective::base_score(group, matrix, params)?;
        let model = Model {
            objective: params.objective,
            outputs: params.outputs(),
            base_scores: vec![base_score],
            scale_pos_weight: params.scale_pos_weight as f32,
            features: matrix.features.clone(),
            trees: Vec::new(),
            output_of_tree: Vec::new(),
            best_round: None,
        };
        Booster::with_model(group, team, matrix, params, model)
    }

    /// Continues a training with the trees of a model that was trained on the same data. Collective.
    pub fn resume(
        group: &'a Group,
        team: &'a Team,
        matrix: &'a Matrix,
        params: &'a Params,
        model: Model,
    ) -> Result<Booster<'a>> {
        params.check()?;
        objective::check_labels(group, matrix, params)?;
        if model.objective != params.objective
            || model.outputs != params.outputs()
            || model.features != matrix.features
        {
            return Err(Error::Input(
                "the checkpoint was trained with another objective or on other features".into(),
            ));
        }
        Booster::with_model(group, team, matrix, params, model)
    }

    fn with_model(
        group: &'a Group,
        team: &'a Team,
        matrix: &'a Matrix,
        params: &'a Params,
        model: Model,
    ) -> Result<Booster<'a>> {
        let monotone = monotone(matrix, params)?;
        let categories = matrix.cuts.features.iter().map(|feature| feature.categories).max();
        let set_words = categories.unwrap_or(0).div_ceil(64);
        let outputs = params.outputs();
        let mut margins = model.base_margins(matrix.rows);
        // In the order of the trees, so that the sums have the bits of the interrupted training.
        for (tree, output) in model.trees.iter().zip(&model.output_of_tree) {
            let margins = &mut margins[output * matrix.rows..][..matrix.rows];
            add_tree(team, &BinnedTree::new(tree, &matrix.cuts), matrix, &tree.threshold, margins);
        }
        Ok(Booster {
            group,
            team,
            matrix,
            params,
            exchange: Exchange::new(group, &matrix.layout, set_words),
            monotone,
            model,
            margins,
            pairs: vec![Pair::default(); outputs * matrix.rows],
            packed: vec![0; matrix.rows],
            partition: Partition::new(matrix.rows),
            buffers: Buffers::default(),
            statistics: Statistics::default(),
        })
    }

    /// Adds the trees of one round. Collective.
    pub fn round(&mut self) -> Result<()> {
        let (matrix, params, team) = (self.matrix, self.params, self.team);
        let (rows, outputs) = (matrix.rows, params.outputs());
        objective::gradients(team, matrix, params, &self.margins, &mut self.pairs);
        let round = self.model.rounds() as u64;
        for output in 0..outputs {
            let pairs = &mut self.pairs[output * rows..][..rows];
            sample_rows(team, params, round, matrix.first_row, pairs);
        }
        let scales =
            gradient::scales(self.group, team, &self.pairs, matrix.total_rows * outputs as u64)?;
        for output in 0..outputs {
            let number = round * outputs as u64 + output as u64;
            let pairs = &self.pairs[output * rows..][..rows];
            let dither = Dither { seed: params.seed, tree: number, first_row: matrix.first_row };
            gradient::pack(team, pairs, &scales, dither, &mut self.packed);
            let mut total = [self.packed.iter().sum::<i64>()];
            self.group.all_reduce(&mut total, Op::Sum)?;
            let grower = Grower {
                team,
                matrix,
                params,
                exchange: &self.exchange,
                monotone: &self.monotone,
                packed: &self.packed,
                scales,
                total: total[0],
                number,
            };
            let mut grown = grower.grow(&mut self.partition, &mut self.buffers)?;
            let margins = &mut self.margins[output * rows..][..rows];
            let mut output_rows = Output { matrix, pairs, scales, margins };
            let tree = (&mut grown, &mut self.partition);
            leaf::finish(self.group, team, params, tree, &mut output_rows)?;
            self.statistics.histograms += grown.reductions;
            self.statistics.searches.extend(grown.searches);
            self.statistics.leaves.push(grown.leaves.len());
            self.model.trees.push(grown.tree);
            self.model.output_of_tree.push(output);
        }
        Ok(())
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    pub fn model_mut(&mut self) -> &mut Model {
        &mut self.model
    }

    pub fn into_model(self) -> Model {
        self.model
    }

    pub fn matrix(&self) -> &Matrix {
        self.matrix
    }

    /// Margins of the training rows: `output * rows + row`.
    pub fn margins(&self) -> &[f32] {
        &self.margins
    }

    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    pub fn reduction(&self) -> Reduction {
        self.exchange.reduction
    }

    /// Traffic of this rank in all rounds since the start, by the cost formulas of `comm`. `None` if an engine does not
    /// report its traffic.
    pub fn predicted_traffic(&self, access: BufferAccess) -> Option<Traffic> {
        let (exchange, statistics) = (&self.exchange, &self.statistics);
        let reduce = |count: usize| exchange.traffic(Collective::AllReduce, count, access);
        let mut parts = vec![exchange.of_histogram(access)?; statistics.histograms];
        for nodes in &statistics.searches {
            parts.push(exchange.of_search(*nodes, access)?);
        }
        // Per round the largest derivatives and their sums, per tree the total and the sums of the leaves.
        for _ in 0..statistics.leaves.len() / self.model.outputs {
            parts.extend([reduce(2)?, reduce(2)?]);
        }
        for leaves in &statistics.leaves {
            parts.extend([reduce(1)?, reduce(2 * leaves)?]);
        }
        Some(parts.into_iter().sum())
    }
}

/// Adds the leaf values of a tree to the margins of all rows.
pub(crate) fn add_tree(
    team: &Team,
    tree: &BinnedTree<'_>,
    matrix: &Matrix,
    values: &[f32],
    margins: &mut [f32],
) {
    let parts = crate::par::pieces(matrix.rows, 1 << 13, usize::MAX);
    let margins = crate::par::Disjoint::new(margins);
    crate::par::for_each(team, parts.len(), &|part| {
        // SAFETY: the parts are disjoint.
        let mine = unsafe { margins.range(parts[part].clone()) };
        for (row, margin) in parts[part].clone().zip(mine) {
            *margin += values[tree.leaf(matrix, row)];
        }
    });
}

fn monotone(matrix: &Matrix, params: &Params) -> Result<Vec<i8>> {
    let mut directions = vec![0; matrix.features.len()];
    for (name, direction) in &params.monotone {
        let feature = matrix.features.iter().position(|feature| feature.name == *name);
        let feature = feature
            .ok_or_else(|| Error::Input(format!("monotone.{name}: there is no such feature")))?;
        if *direction != 0 && matrix.features[feature].categories.is_some() {
            return Err(Error::Input(format!("monotone.{name}: the feature is categorical")));
        }
        directions[feature] = *direction;
    }
    let any = directions.iter().any(|direction| *direction != 0);
    if any && matches!(params.objective, Objective::AbsoluteError | Objective::Quantile) {
        return Err(Error::Input(
            "monotone constraints do not work with absolute_error and quantile, whose leaves are medians".into(),
        ));
    }
    Ok(if any { directions } else { Vec::new() })
}
