//! Gradient-boosted trees over row shards: every rank has some rows, and all ranks train the same model together. The
//! model does not depend on the number of ranks or threads. Knows no neural model. See README.md for the algorithms.
//!
//! ```
//! use lockstep_comm::single_rank;
//! use lockstep_gbdt::{Matrix, Objective, Params, Table, Team, train};
//!
//! let group = single_rank();
//! let x: Vec<f32> = (0..200).map(|row| row as f32).collect();
//! let label = x.iter().map(|x| f32::from(*x >= 100.0)).collect();
//! let table = Table::dense(vec!["x".into()], x, label);
//! let matrix = Matrix::new(&group, &table, None, 256, &Team::new(1))?;
//! let params = Params { objective: Objective::Logistic, rounds: 20, ..Params::default() };
//! let model = train(&group, &matrix, &params)?;
//! assert!(model.predict_row(&[30.0])[0] < 0.1 && model.predict_row(&[170.0])[0] > 0.9);
//! # Ok::<(), lockstep_gbdt::Error>(())
//! ```

mod checkpoint;
mod collective;
mod config;
pub mod data;
mod error;
mod generate;
mod matrix;
mod metric;
mod model;
mod objective;
mod par;
mod params;
mod run;
mod train;

pub use checkpoint::Checkpoint;
pub use collective::all_succeed;
pub use config::{Config, Data, Options};
pub use data::{Schema, Table};
pub use error::{Error, Result};
pub use generate::Generate;
pub use lockstep_kernels::Team;
pub use matrix::{Cache, Cuts, Feature, FeatureCuts, Layout, Matrix, Section, Storage, sketch};
pub use metric::Metric;
pub use model::{
    Importance, Model, ModelFormat, PredictionKind, Split, Tree, describe, importance,
};
pub use params::{Growth, MAX_BINS, Objective, Params};
pub use run::{Event, Finished, Run, run};
pub use train::{
    AfterRound, Booster, EvalSet, Evaluation, Progress, Reduction, Statistics, fit, train,
};
