//! `lockstep trees`: trains and uses gradient-boosted trees.

mod convert;
mod eval;
mod file;
mod inspect;
mod output;
mod predict;
mod train;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use lockstep_gbdt::data::Format;
use lockstep_gbdt::{Model, Schema};

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Train(train::Args),
    Predict(predict::Args),
    Eval(eval::Args),
    Inspect(inspect::Args),
    Import(convert::ImportArgs),
    Export(convert::ExportArgs),
}

impl Args {
    /// Whether the command starts ranks.
    pub fn has_ranks(&self) -> bool {
        matches!(self.command, Command::Train(_))
    }
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Train(args) => train::run(args),
        Command::Predict(args) => predict::run(args),
        Command::Eval(args) => eval::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Import(args) => convert::import(args),
        Command::Export(args) => convert::export(args),
    }
}

/// Loads a model file, or the model of a run folder.
fn load_model(path: &Path) -> anyhow::Result<Model> {
    if !path.is_dir() {
        return Ok(Model::load(path)?);
    }
    let found =
        ["model.ubj", "model.json"].map(|name| path.join(name)).into_iter().find(|p| p.exists());
    let Some(found) = found else {
        bail!("{} has no model.json or model.ubj; the run is not finished", path.display());
    };
    Ok(Model::load(&found)?)
}

/// A data file and the roles of its columns.
#[derive(clap::Args)]
struct DataArgs {
    /// CSV, LibSVM, .npy, parquet or Arrow IPC file
    data: PathBuf,
    /// Format of the file: csv, libsvm, npy, parquet or arrow [default: from the file name]
    #[arg(long, value_parser = parse_format)]
    format: Option<Format>,
    /// Column of the labels [default: `label`, else the first column where labels are needed]
    #[arg(long, value_name = "COLUMN")]
    label: Option<String>,
    /// Column of the weights
    #[arg(long, value_name = "COLUMN")]
    weight: Option<String>,
    /// Column of the groups of a ranking
    #[arg(long, value_name = "COLUMN")]
    group: Option<String>,
    /// Column that is not used; may be repeated
    #[arg(long, value_name = "COLUMN")]
    ignore: Vec<String>,
    /// The CSV file has no line of names
    #[arg(long)]
    no_header: bool,
    /// Threads [default: all cores]
    #[arg(long)]
    threads: Option<usize>,
}

impl DataArgs {
    /// The schema for rows that a model predicts.
    fn schema(&self, model: &Model) -> Schema {
        let categorical = model.features.iter().filter(|feature| feature.categories.is_some());
        Schema {
            label: self.label.clone(),
            weight: self.weight.clone(),
            group: self.group.clone(),
            categorical: categorical.map(|feature| feature.name.clone()).collect(),
            ignore: self.ignore.clone(),
            header: self.no_header.then_some(false),
            separator: None,
            features: (!matches!(
                self.format_of(),
                Ok(Format::Csv | Format::Npy | Format::Parquet)
            ))
            .then_some(model.features.len()),
        }
    }

    fn format_of(&self) -> lockstep_gbdt::Result<Format> {
        self.format.map_or_else(|| Format::of(&self.data), Ok)
    }

    fn team(&self) -> anyhow::Result<lockstep_gbdt::Team> {
        if self.threads == Some(0) {
            bail!("--threads must be at least 1 (got 0)");
        }
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        Ok(lockstep_gbdt::Team::new(self.threads.unwrap_or(cores)))
    }

    /// Reads all rows.
    fn read(
        &self,
        model: &Model,
        labeled: bool,
        team: &lockstep_gbdt::Team,
    ) -> anyhow::Result<lockstep_gbdt::Table> {
        let categories = model
            .features
            .iter()
            .filter_map(|feature| Some((feature.name.clone(), feature.categories.clone()?)))
            .collect();
        let schema = self.schema(model);
        let reader = lockstep_gbdt::data::Reader {
            schema: &schema,
            format: self.format,
            labeled,
            team,
            spill: None,
            categories: Some(&categories),
        };
        let world = lockstep_comm::single_rank();
        Ok(lockstep_gbdt::data::read(&world, &self.data, &reader)?)
    }
}

fn parse_format(text: &str) -> Result<Format, String> {
    match text {
        "csv" => Ok(Format::Csv),
        "libsvm" => Ok(Format::Libsvm),
        "npy" => Ok(Format::Npy),
        "parquet" => Ok(Format::Parquet),
        "arrow" => Ok(Format::Arrow),
        _ => Err("use csv, libsvm, npy, parquet or arrow".into()),
    }
}

/// Writes a file atomically.
fn write_file(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    lockstep_ckpt::Disk::default().replace(path, bytes).context("cannot write the output")
}
