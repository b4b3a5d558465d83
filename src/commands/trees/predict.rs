//! `lockstep trees predict`: predictions of a model for the rows of a file.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use lockstep_gbdt::PredictionKind;

use super::{DataArgs, load_model, write_file};

/// Predict the rows of a file
///
/// Writes one line per row: the prediction, or one probability per class. Values that the model does not know are
/// missing values.
#[derive(clap::Args)]
pub struct Args {
    /// Model file (.json or .ubj) or run folder
    model: PathBuf,
    #[command(flatten)]
    data: DataArgs,
    /// File to write: CSV, or a float32 array if it ends in .npy [default: CSV to standard output]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write sums of the trees instead of predictions
    #[arg(long)]
    margins: bool,
    /// Write the contribution of each feature to the margin, and the expected margin (TreeSHAP)
    #[arg(long, conflicts_with = "margins")]
    contributions: bool,
    /// Write the leaf of each tree
    #[arg(long, conflicts_with_all = ["margins", "contributions"])]
    leaves: bool,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let model = load_model(&args.model)?;
    let team = args.data.team()?;
    let table = args.data.read(&model, false, &team)?;
    let rows = match (args.margins, args.contributions, args.leaves) {
        (true, ..) => PredictionKind::Margins,
        (_, true, _) => PredictionKind::Contributions,
        (.., true) => PredictionKind::Leaves,
        _ => PredictionKind::Predictions,
    };
    let values = model.predict(&table, rows, &team)?;
    let width = model.width(rows);
    match &args.output {
        Some(path) if path.extension().is_some_and(|extension| extension == "npy") => {
            write_file(path, &npy(&values, width))?;
        }
        Some(path) => write_file(path, csv(&values, width).as_bytes())?,
        // `main` exits quietly if the reader stops.
        None => std::io::stdout().write_all(csv(&values, width).as_bytes())?,
    }
    Ok(ExitCode::SUCCESS)
}

fn csv(values: &[f32], width: usize) -> String {
    let mut out = String::new();
    for row in values.chunks_exact(width.max(1)) {
        for (index, value) in row.iter().enumerate() {
            let separator = if index > 0 { "," } else { "" };
            let _ = write!(out, "{separator}{value}");
        }
        out.push('\n');
    }
    out
}

/// A .npy file of version 1.
fn npy(values: &[f32], width: usize) -> Vec<u8> {
    let rows = values.len() / width.max(1);
    let shape = if width == 1 { format!("({rows},)") } else { format!("({rows}, {width})") };
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}");
    while !(header.len() + 11).is_multiple_of(64) {
        header.push(' ');
    }
    header.push('\n');
    let mut out = b"\x93NUMPY\x01\x00".to_vec();
    out.extend((header.len() as u16).to_le_bytes());
    out.extend(header.as_bytes());
    out.extend(lockstep_comm::bytes_of(values));
    out
}
