//! `lockstep trace`: prints the timeline of a run, compares two, or asks a running job for one.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use lockstep_dash::{RunFolder, RunState};
use lockstep_events::trace::{
    TRACE_DIR, TRACE_REQUEST, Timeline, compare, merged_path, report, trace_folders, write_chrome,
};
use serde_json::json;

use crate::print::print_line;

/// Print the timeline of a run, compare two, or ask a running job for one
///
/// A timeline is recorded by `lockstep train --trace 20..23`, by --request, or by SIGUSR1 to the training process. The
/// merged file RUN/trace/steps-A-B.json.gz opens in Perfetto (ui.perfetto.dev) and chrome://tracing.
#[derive(clap::Args)]
pub struct Args {
    /// Run folder, or the folder of one of its timelines, RUN/trace/steps-A-B [default timeline: the last one]
    run: PathBuf,
    /// Another run or timeline to compare with
    other: Option<PathBuf>,
    /// Ask the running job for a timeline of its next N steps
    #[arg(long, value_name = "N", conflicts_with = "other")]
    request: Option<u64>,
    /// Merge the files of the ranks again, e.g. after copying them from other hosts
    #[arg(long, conflicts_with = "request")]
    merge: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(steps) = args.request {
        return request(&args.run, steps);
    }
    let folder = timeline_folder(&args.run)?;
    let timeline = read(&folder)?;
    if args.merge {
        let path = merged_path(&folder);
        write_chrome(&timeline, &path)
            .with_context(|| format!("cannot write {}", path.display()))?;
        print_line!("merged {}", path.display());
        return Ok(ExitCode::SUCCESS);
    }
    let other = args.other.as_deref().map(|other| read(&timeline_folder(other)?)).transpose()?;
    match (other, args.json) {
        (Some(other), false) => print_line!("{}", compare(&timeline, &other).trim_end()),
        (Some(other), true) => print_line!("{}", json!([values(&timeline), values(&other)])),
        (None, false) => {
            print_line!("{}", report(&timeline).trim_end());
            print_line!("\nfile: {}", merged_path(&folder).display());
        }
        (None, true) => print_line!("{}", values(&timeline)),
    }
    Ok(ExitCode::SUCCESS)
}

/// The timeline as JSON: times of each rank, and the critical path of each step.
fn values(timeline: &Timeline) -> serde_json::Value {
    let (first, last) = timeline.steps().unwrap_or((1, 0));
    let paths: Vec<_> = (first..=last).filter_map(|step| timeline.critical_path(step)).collect();
    json!({
        "steps": [first, last],
        "clock_error_s": timeline.alignment_error(),
        "ranks": timeline.breakdowns(),
        "reported": timeline.ranks.iter().map(|rank| &rank.steps).collect::<Vec<_>>(),
        "critical_paths": paths,
    })
}

/// The last timeline of a run, or the given one.
fn timeline_folder(path: &Path) -> anyhow::Result<PathBuf> {
    let is_timeline =
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("steps-"));
    if is_timeline && path.is_dir() {
        return Ok(path.to_path_buf());
    }
    match trace_folders(path).pop() {
        Some(folder) => Ok(folder),
        None => bail!(
            "{} has no timeline; record one with `lockstep train … --trace 20..23`, or with `lockstep trace {} \
             --request 3` while it is training",
            path.display(),
            path.display()
        ),
    }
}

fn read(folder: &Path) -> anyhow::Result<Timeline> {
    Timeline::read(folder).with_context(|| format!("cannot read the timeline {}", folder.display()))
}

fn request(run: &Path, steps: u64) -> anyhow::Result<ExitCode> {
    let state = RunFolder::open(run).map(|run| run.state);
    if !matches!(state, Ok(RunState::Starting | RunState::Running | RunState::Stuck)) {
        bail!("{} is not the folder of a run that is training", run.display());
    }
    if steps == 0 {
        bail!("--request must be at least 1 (got 0)");
    }
    let folder = run.join(TRACE_DIR);
    let path = folder.join(TRACE_REQUEST);
    std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::write(&path, steps.to_string()))
        .with_context(|| format!("cannot write {}", path.display()))?;
    print_line!(
        "asked for {steps} step(s); the ranks record them next, and `lockstep trace {}` shows them",
        run.display()
    );
    Ok(ExitCode::SUCCESS)
}
