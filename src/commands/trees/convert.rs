//! `lockstep trees import` and `export`: models of XGBoost, as JSON or UBJ.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};

use super::load_model;
use crate::print::print_line;

/// Import a model of XGBoost (1.7 or later) as a run
#[derive(clap::Args)]
pub struct ImportArgs {
    /// Model file of XGBoost (.json or .ubj)
    model: PathBuf,
    /// Name of the run
    name: String,
    /// Directory that contains run folders
    #[arg(long, default_value = "runs")]
    runs: PathBuf,
}

pub fn import(args: ImportArgs) -> anyhow::Result<ExitCode> {
    let model = load_model(&args.model)?;
    let folder = args.runs.join(&args.name);
    if folder.exists() {
        bail!("{} already exists; choose another name", folder.display());
    }
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    model.save(&folder.join("model.json"))?;
    model.save(&folder.join("model.ubj"))?;
    let (trees, features) = (model.trees.len(), model.features.len());
    print_line!("imported {trees} trees over {features} features to {}", folder.display());
    Ok(ExitCode::SUCCESS)
}

/// Export a model in a format that XGBoost (1.7 to 3.x) loads
#[derive(clap::Args)]
pub struct ExportArgs {
    /// Run folder or model file
    model: PathBuf,
    /// File to write: .json or .ubj
    output: PathBuf,
}

pub fn export(args: ExportArgs) -> anyhow::Result<ExitCode> {
    let model = load_model(&args.model)?;
    model.save(&args.output)?;
    print_line!("wrote {}", args.output.display());
    Ok(ExitCode::SUCCESS)
}
