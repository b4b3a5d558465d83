//! `lockstep trees inspect`: a model as text.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use lockstep_gbdt::{describe, importance};

use super::load_model;
use crate::print::{print_line, print_part};

/// Show a model: its size, the importance of features, and trees as text
#[derive(clap::Args)]
pub struct Args {
    /// Model file (.json or .ubj) or run folder
    model: PathBuf,
    /// Tree to show as text, from 0; may be repeated
    #[arg(long, value_name = "N")]
    tree: Vec<usize>,
    /// Show all trees as text
    #[arg(long)]
    trees: bool,
    /// Number of features to show
    #[arg(long, default_value_t = 20, value_name = "N")]
    features: usize,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let model = load_model(&args.model)?;
    let count = model.trees.len();
    let leaves: usize = model.trees.iter().map(|tree| tree.leaves()).sum();
    print_line!(
        "objective {}, {} output(s), base score {:?}",
        model.objective.xgboost_name(),
        model.outputs,
        model.base_scores
    );
    print_line!("{count} trees with {leaves} leaves, {} features", model.features.len());
    if let Some(round) = model.best_round {
        print_line!("best round {}; predictions use the trees up to it", round + 1);
    }
    print_line!("{:<24} {:>8} {:>14} {:>14}", "feature", "count", "mean gain", "mean cover");
    for feature in importance(&model).iter().take(args.features) {
        let splits = feature.count as f64;
        print_line!(
            "{:<24} {:>8} {:>14.4} {:>14.2}",
            feature.feature,
            feature.count,
            feature.gain / splits,
            feature.cover / splits
        );
    }
    let all: Vec<usize> = if args.trees { (0..count).collect() } else { args.tree };
    for tree in all {
        let Some(nodes) = model.trees.get(tree) else {
            bail!("tree {tree} is out of range: the model has {count} trees");
        };
        print_line!("tree {tree} (output {}):", model.output_of_tree[tree]);
        print_part!("{}", describe(&model, nodes));
    }
    Ok(ExitCode::SUCCESS)
}
