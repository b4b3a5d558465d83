//! `lockstep doctor`: says what limits a run, what went wrong, and what to do next.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use lockstep_dash::doctor::{Diagnosis, diagnose};
use lockstep_dash::{RunFolder, list_runs};
use lockstep_plan::DeviceType;
use lockstep_sim::Cluster;

use crate::machine;
use crate::print::print_line;

/// Say what limits a run, what went wrong, and what to do next
///
/// Reads the folder of a running, finished or crashed run. Gains are predicted by the simulator, calibrated on this run.
///
/// Exit codes: 0 nothing is wrong; 1 the folder cannot be read; 2 the run failed; 3 it is stuck.
#[derive(clap::Args)]
pub struct Args {
    /// Run folder, e.g. runs/songs
    run: PathBuf,
    /// Machine description (from `bench machine`) [default: machine.toml next to the run folder, if it exists]
    #[arg(long, value_name = "FILE")]
    cluster: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let folder = RunFolder::open(&args.run).with_context(|| {
        let runs = args.run.parent().map(list_runs).unwrap_or_default();
        let names: Vec<String> = runs.iter().map(|run| run.display().to_string()).collect();
        match names.is_empty() {
            true => "give the folder of a run, e.g. runs/songs".to_string(),
            false => format!("runs in the same directory: {}", names.join(", ")),
        }
    })?;
    let machine = cluster(&folder, args.cluster.as_deref())?;
    let diagnosis = diagnose(&folder, machine.as_ref());
    match args.json {
        true => print_line!("{}", serde_json::to_string_pretty(&diagnosis)?),
        false => print_line!("{}", diagnosis.to_string().trim_end()),
    }
    Ok(ExitCode::from(diagnosis.exit_code()))
}

/// The described machine for the ranks of a run. The default description is optional.
fn cluster(run: &RunFolder, named: Option<&str>) -> anyhow::Result<Option<Cluster>> {
    let plan = run.plan.as_ref();
    let (ranks, kind) = (plan.map(|plan| plan.ranks), plan.map(|plan| plan.device.kind));
    match named {
        Some(name) => machine::cluster(name, ranks, kind).map(Some),
        None => Ok(default_cluster(&run.path, ranks, kind)),
    }
}

fn default_cluster(run: &Path, ranks: Option<usize>, kind: Option<DeviceType>) -> Option<Cluster> {
    let path = run.parent()?.join("machine.toml");
    let read = || machine::cluster(&path.display().to_string(), ranks, kind).ok();
    path.exists().then(read).flatten()
}

/// The verdict on a run in one line, if there is enough to judge.
pub fn verdict(run: &Path, ranks: usize) -> Option<String> {
    let folder = RunFolder::open(run).ok()?;
    let kind = folder.plan.as_ref().map(|plan| plan.device.kind);
    let machine = default_cluster(run, Some(ranks), kind);
    let Diagnosis { verdict, limits, .. } = diagnose(&folder, machine.as_ref());
    (!limits.is_empty()).then_some(verdict)
}
