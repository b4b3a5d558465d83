//! `lockstep trees eval`: metrics of a model on a labeled file.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::anyhow;
use lockstep_gbdt::{Matrix, Metric, PredictionKind, Table};

use super::{DataArgs, load_model};
use crate::print::print_line;

/// Evaluate a model on a labeled file
#[derive(clap::Args)]
pub struct Args {
    /// Model file (.json or .ubj) or run folder
    model: PathBuf,
    #[command(flatten)]
    data: DataArgs,
    /// Metrics, separated by commas [default: that of the objective]
    #[arg(long, value_delimiter = ',')]
    metrics: Vec<String>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let model = load_model(&args.model)?;
    let team = args.data.team()?;
    let table = args.data.read(&model, true, &team)?;
    let rows = table.rows();
    let by_row = model.predict(&table, PredictionKind::Margins, &team)?;
    // Metrics want one output after the other.
    let outputs = model.outputs;
    let margins: Vec<f32> = (0..outputs)
        .flat_map(|k| (0..rows).map(move |row| (k, row)))
        .map(|(k, row)| by_row[row * outputs + k])
        .collect();
    let mut labels = Table::dense(Vec::new(), Vec::new(), table.label);
    (labels.weight, labels.group) = (table.weight, table.group);
    let world = lockstep_comm::single_rank();
    let matrix = Matrix::new(&world, &labels, None, 2, &team)?;
    let names = match args.metrics.is_empty() {
        true => vec![model.objective.default_metric().to_string()],
        false => args.metrics,
    };
    for name in names {
        let metric = Metric::parse(&name).map_err(|what| anyhow!("{what}"))?;
        let value = metric.compute(&world, &matrix, model.objective, &margins)?;
        print_line!("{name} {value:.6}");
    }
    Ok(ExitCode::SUCCESS)
}
