//! Training: boosting rounds over the rows of all ranks.

pub(crate) mod booster;
pub(crate) mod evaluate;
mod exchange;
pub(crate) mod gradient;
mod grow;
mod histogram;
pub(crate) mod leaf;
mod partition;
mod sample;
mod split;

pub use booster::{Booster, Statistics};
pub use evaluate::{AfterRound, EvalSet, Evaluation, Progress, fit};
pub use exchange::Reduction;

use lockstep_comm::Group;
use lockstep_kernels::Team;

use crate::error::Result;
use crate::matrix::Matrix;
use crate::model::Model;
use crate::params::Params;

/// Trains a model on the rows of all ranks, on one thread per rank. Collective; every rank gets the same model, and it
/// is the same for any number of ranks.
///
/// ```
/// use lockstep_comm::{on_threads, shard_range};
/// use lockstep_gbdt::{Matrix, Params, Table, Team, train};
///
/// let models = on_threads(2, |group| {
///     // y = x on 100 rows, of which each rank has half.
///     let x: Vec<f32> = shard_range(100, 2, group.rank()).map(|row| row as f32).collect();
///     let table = Table::dense(vec!["x".into()], x.clone(), x);
///     let matrix = Matrix::new(&group, &table, None, 256, &Team::new(1))?;
///     train(&group, &matrix, &Params { rounds: 50, ..Params::default() })
/// });
/// let model = models.into_iter().next().unwrap()?;
/// assert!((model.predict_row(&[70.0])[0] - 70.0).abs() < 2.0);
/// # Ok::<(), lockstep_gbdt::Error>(())
/// ```
pub fn train(group: &Group, matrix: &Matrix, params: &Params) -> Result<Model> {
    let team = Team::new(1);
    let mut booster = Booster::new(group, &team, matrix, params)?;
    for _ in 0..params.rounds {
        booster.round()?;
    }
    Ok(booster.into_model())
}
