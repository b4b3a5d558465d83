//! A run folder and the state of its run.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use lockstep_events::{RankTimes, StepReport, read_last_rank_times};
use lockstep_plan::Plan;
use serde::Serialize;

use crate::flight::{FailureRecord, FlightRecord, ReplayRecord, failures, flights, replays};
use crate::logs::{RankLog, rank_logs};
use crate::metrics::MetricsReader;

/// The process that trains a run rewrites the lock every second. An older lock belongs to a process that is gone.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// A running job without a report for this many times the usual interval is stuck.
const STUCK_INTERVALS: f64 = 10.0;
/// Shortest time without a report after which a running job may be stuck.
const MIN_STUCK: Duration = Duration::from_secs(30);

const METRICS: &str = "metrics.jsonl";
/// Bytes at the end of the metrics that [`RunFolder::open_end`] reads: thousands of reports.
const END: u64 = 4 << 20;

/// The contents of a run folder.
#[derive(Debug)]
pub struct RunFolder {
    pub path: PathBuf,
    pub name: String,
    /// None if the folder has no readable `plan.json`.
    pub plan: Option<Plan>,
    pub metrics: MetricsReader,
    /// The last times of the ranks.
    pub ranks: Vec<RankTimes>,
    pub failures: Vec<FailureRecord>,
    pub flights: Vec<FlightRecord>,
    pub replays: Vec<ReplayRecord>,
    /// Number of starts of the ranks.
    pub generation: u64,
    pub checkpoints: Vec<CheckpointInfo>,
    pub state: RunState,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// Created, but no step was reported yet.
    Starting,
    Running,
    /// Running, but without a report for a long time.
    Stuck,
    /// The last step was reached.
    Finished,
    /// Ended before its last step without a failure.
    Stopped,
    Failed,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct CheckpointInfo {
    pub step: u64,
    pub bytes: u64,
}

impl RunState {
    pub fn name(self) -> &'static str {
        match self {
            RunState::Starting => "starting",
            RunState::Running => "running",
            RunState::Stuck => "stuck",
            RunState::Finished => "finished",
            RunState::Stopped => "stopped",
            RunState::Failed => "failed",
        }
    }
}

impl RunFolder {
    /// Reads a run folder. Missing and damaged files are tolerated; the folder itself must exist.
    pub fn open(path: &Path) -> io::Result<RunFolder> {
        RunFolder::with_metrics(path, MetricsReader::new(&path.join(METRICS)))
    }

    /// Reads a run folder, but of its metrics only the end, so that a long run is read as fast as a short one.
    pub fn open_end(path: &Path) -> io::Result<RunFolder> {
        RunFolder::with_metrics(path, MetricsReader::at_end(&path.join(METRICS), END)?)
    }

    fn with_metrics(path: &Path, metrics: MetricsReader) -> io::Result<RunFolder> {
        if !path.is_dir() {
            let text = format!("{} is not a run folder", path.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        let mut run = RunFolder {
            name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            plan: None,
            metrics,
            ranks: Vec::new(),
            failures: Vec::new(),
            flights: Vec::new(),
            replays: Vec::new(),
            generation: 0,
            checkpoints: Vec::new(),
            state: RunState::Starting,
            path: path.to_path_buf(),
        };
        run.refresh()?;
        Ok(run)
    }

    /// Reads what changed since the last call.
    pub fn refresh(&mut self) -> io::Result<()> {
        self.metrics.update()?;
        let plan = std::fs::read(self.path.join("plan.json")).ok();
        self.plan = plan.and_then(|text| serde_json::from_slice(&text).ok());
        self.ranks = read_last_rank_times(&self.path.join("ranks.jsonl")).unwrap_or_default();
        let logs = self.logs_dir();
        self.failures = failures(&logs);
        self.flights = flights(&logs);
        self.replays = replays(&logs);
        self.generation = generation(&self.path);
        self.checkpoints = checkpoints(&self.path);
        self.state = state_of(&self.path, &self.find_progress());
        Ok(())
    }

    fn logs_dir(&self) -> PathBuf {
        self.path.join("logs")
    }

    /// The logs of all ranks.
    pub fn logs(&self) -> Vec<RankLog> {
        rank_logs(&self.logs_dir())
    }

    /// Reports of training steps, without evaluations and checkpoints.
    pub fn steps(&self) -> impl DoubleEndedIterator<Item = &StepReport> {
        self.metrics.reports.iter().filter(|report| report.tokens_per_s.is_some())
    }

    /// The last step that was reported, and the last step of the run.
    pub fn progress(&self) -> (usize, usize) {
        let planned = self.plan.as_ref().map_or(0, |plan| plan.train.steps);
        let last = self.metrics.reports.last();
        last.map_or((0, planned), |report| (report.step, report.steps))
    }

    fn find_progress(&self) -> Progress {
        let (step, steps) = self.progress();
        let mut last = self.steps().rev().filter_map(|report| report.elapsed_s);
        let interval = match (last.next(), last.next()) {
            (Some(last), Some(before)) => last - before,
            _ => 0.0,
        };
        Progress { step, steps, interval }
    }
}

/// How far a run is.
pub(crate) struct Progress {
    pub step: usize,
    pub steps: usize,
    /// Seconds between the last two reports.
    pub interval: f64,
}

/// The state of the run in `path`. Reads the lock, the generation and the failures, but no metrics.
pub(crate) fn state_of(path: &Path, progress: &Progress) -> RunState {
    let Progress { step, steps, interval } = *progress;
    let age = |name: &str| {
        let modified = path.join(name).metadata().and_then(|meta| meta.modified());
        modified.ok().and_then(|time| SystemTime::now().duration_since(time).ok())
    };
    let alive = age("lock").is_some_and(|age| age < LOCK_TIMEOUT);
    let finished = steps > 0 && step >= steps;
    if alive && step > 0 && !finished {
        let limit = MIN_STUCK.as_secs_f64().max(STUCK_INTERVALS * interval);
        let silent = age("metrics.jsonl").is_some_and(|age| age.as_secs_f64() > limit);
        return if silent { RunState::Stuck } else { RunState::Running };
    }
    if alive && !finished {
        return RunState::Starting;
    }
    // A failure of an earlier generation was survived.
    let (failures, logs) = (failures(&path.join("logs")), path.join("logs"));
    let survived = |failure: &FailureRecord| u64::from(failure.generation) < generation(path);
    let failed = match failures.last() {
        Some(failure) => !survived(failure),
        None => !finished && (!flights(&logs).is_empty() || path.join("failed").exists()),
    };
    match failed {
        true => RunState::Failed,
        false if finished => RunState::Finished,
        false if step == 0 && !path.join("plan.json").exists() => RunState::Starting,
        false => RunState::Stopped,
    }
}

/// Number of starts of the ranks.
fn generation(run: &Path) -> u64 {
    let text = std::fs::read_to_string(run.join("generation")).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// Committed checkpoints by step.
fn checkpoints(run: &Path) -> Vec<CheckpointInfo> {
    let entries = std::fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
    let info = |path: PathBuf| -> Option<CheckpointInfo> {
        let step = path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()?;
        path.join("manifest.json").exists().then_some(())?;
        let files = std::fs::read_dir(&path).ok()?.flatten();
        let bytes = files.filter_map(|file| file.metadata().ok()).map(|meta| meta.len()).sum();
        Some(CheckpointInfo { step, bytes })
    };
    let mut found: Vec<CheckpointInfo> = entries.filter_map(|entry| info(entry.path())).collect();
    found.sort_by_key(|checkpoint| checkpoint.step);
    found
}

/// The run folders in a directory, by name: folders with a plan or metrics.
pub fn list_runs(runs: &Path) -> Vec<PathBuf> {
    let is_run =
        |path: &Path| ["plan.json", "metrics.jsonl"].iter().any(|file| path.join(file).exists());
    let entries = std::fs::read_dir(runs).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|path| is_run(path)).collect();
    found.sort();
    found
}
