//! Diagnosis of a run that failed or is stuck: the first failing rank, what it did, who waited, and whether it
//! would happen again.

use lockstep_events::MemoryUnit;
use lockstep_plan::{DeviceType, Ledger, Plan};
use lockstep_sim::{Cluster, Options, estimate};
use serde::Serialize;

use super::advice::ways_to_fit;
use super::calibration::{Calibrated, calibrate};
use super::failure_class::{FailureClass, classify, number_after};
use super::measured::Measured;
use super::patterns;
use crate::{FailureRecord, FlightRecord, RunFolder, RunState};

/// The failure of a run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Problem {
    pub kind: FailureKind,
    pub class: FailureClass,
    /// Evidence for the class besides the message.
    pub reason: Option<String>,
    /// Samples that cause it.
    pub samples: Vec<String>,
    /// The first rank that failed.
    pub rank: Option<usize>,
    /// How it ended.
    pub exit: Option<String>,
    /// The sentence that names the cause.
    pub message: String,
    /// The collective in which it failed, or in which the others waited for it.
    pub operation: Option<String>,
    /// Ranks that waited for it.
    pub waited: Vec<usize>,
    /// Last lines of its log.
    pub log: Vec<String>,
    pub action: String,
    /// For out of memory: planned bytes by line of the ledger.
    pub ledger: Vec<(String, u64)>,
    /// For out of memory: the cheapest ways to fit.
    pub fixes: Vec<MemoryFix>,
    /// Number of failures of the run so far.
    pub failures: usize,
}

/// A way to need less memory.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MemoryFix {
    pub set: String,
    /// Bytes that it saves per rank.
    pub saved: u64,
    /// Predicted change of the step time, e.g. 0.1.
    pub slower: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    NotFinite,
    CorruptData,
    OutOfMemory,
    FullDisk,
    CheckpointCorruption,
    LaunchMismatch,
    Disagreement,
    ChangedBits,
    BlockedPort,
    SilentRank,
    LostRank,
    Killed,
    Panic,
    /// A checkpoint could not be saved.
    FailedSave,
    /// Running without progress.
    Stuck,
    Other,
}

impl FailureKind {
    pub fn name(self) -> &'static str {
        match self {
            FailureKind::NotFinite => "NaN or infinity",
            FailureKind::CorruptData => "corrupt data",
            FailureKind::OutOfMemory => "out of memory",
            FailureKind::FullDisk => "full disk",
            FailureKind::CheckpointCorruption => "corrupt checkpoint",
            FailureKind::LaunchMismatch => "launch mismatch",
            FailureKind::Disagreement => "ranks disagree",
            FailureKind::ChangedBits => "changed bits",
            FailureKind::BlockedPort => "blocked port or wrong address",
            FailureKind::SilentRank => "silent rank",
            FailureKind::LostRank => "lost rank",
            FailureKind::Killed => "killed rank",
            FailureKind::Panic => "panic",
            FailureKind::FailedSave => "a checkpoint could not be saved",
            FailureKind::Stuck => "stuck",
            FailureKind::Other => "failure",
        }
    }
}

/// Lines of the failing rank's log that are shown.
const LINES: usize = 12;

/// The failure of a run, if it failed or is stuck.
pub(super) fn problem(run: &RunFolder, machine: Option<&Cluster>) -> Option<Problem> {
    match run.state {
        RunState::Failed => {}
        RunState::Stuck => return failed_save(run).or_else(|| Some(stuck(run))),
        _ => return failed_save(run),
    }
    let failure = run.failures.last();
    let rank = first_failing(run, failure);
    let log = rank.map_or(Vec::new(), |rank| log_of(run, rank));
    let mut lines: Vec<&str> = log.iter().map(String::as_str).collect();
    lines.extend(failure.into_iter().flat_map(|failure| failure.tail.iter().map(String::as_str)));
    lines.extend(run.flights.iter().map(|flight| flight.error.as_str()));
    let other_logs: Vec<String> = match failure {
        Some(_) => Vec::new(),
        None => run.logs().iter().flat_map(|log| log_of(run, log.rank)).collect(),
    };
    lines.extend(other_logs.iter().map(String::as_str));
    let killed = failure.is_some_and(|failure| failure.exit.starts_with("was killed"));
    let oom = failure.is_some_and(|failure| failure.oom_kills.unwrap_or(0) > 0);
    let found = patterns::find(&lines);
    let mut problem = Problem {
        kind: FailureKind::Other,
        class: FailureClass::Unknown,
        reason: None,
        samples: Vec::new(),
        rank,
        exit: failure.map(|failure| failure.exit.clone()),
        message: String::new(),
        operation: operation(&run.flights, rank),
        waited: run.flights.iter().map(|flight| flight.rank).filter(|r| Some(*r) != rank).collect(),
        log: log[log.len().saturating_sub(LINES)..].to_vec(),
        action: "look at the log of the rank".into(),
        ledger: Vec::new(),
        fixes: Vec::new(),
        failures: run.failures.len(),
    };
    match found {
        _ if killed && oom => {
            problem.kind = FailureKind::OutOfMemory;
            problem.class = FailureClass::Deterministic;
            problem.message = "the kernel killed it because memory ran out".into();
            problem.action = "use less memory, see below".into();
        }
        // The others report the loss of a rank that was killed; that is a consequence.
        Some((pattern, _)) if killed && is_consequence(pattern.kind) => killed_rank(&mut problem),
        Some((pattern, line)) => {
            problem.kind = pattern.kind;
            problem.class = pattern.class;
            problem.message = line.trim().to_string();
            problem.action = pattern.action.into();
        }
        None if killed => killed_rank(&mut problem),
        None => problem.message = log.last().cloned().unwrap_or_default(),
    }
    let classified = classify(run, problem.kind, problem.class, &problem.message);
    if let Some(action) = classified.action_after_replay() {
        problem.action = action.into();
    }
    if problem.kind == FailureKind::NotFinite {
        // All ranks stop at once; the message names the one where it started.
        problem.rank =
            number_after(&problem.message, "rank ", ":").map(|rank| rank as usize).or(problem.rank);
    }
    (problem.class, problem.reason) = (classified.class, classified.reason);
    problem.samples = classified.samples;
    if let (FailureKind::OutOfMemory, Some(plan)) = (problem.kind, &run.plan) {
        memory(&mut problem, run, plan, machine);
    }
    Some(problem)
}

fn is_consequence(kind: FailureKind) -> bool {
    matches!(kind, FailureKind::LostRank | FailureKind::SilentRank | FailureKind::BlockedPort)
}

fn killed_rank(problem: &mut Problem) {
    problem.kind = FailureKind::Killed;
    problem.class = FailureClass::Infrastructure;
    problem.message = problem.exit.clone().unwrap_or_default();
    problem.action = "find out who killed it: the kernel log (dmesg), the batch system, or a user; --resume continues \
                      from the newest checkpoint"
        .into();
}

/// The first failing rank: the one that all flight records blame, or else the one whose process failed first.
fn first_failing(run: &RunFolder, failure: Option<&FailureRecord>) -> Option<usize> {
    let mut culprits = run.flights.iter().filter_map(|flight| flight.culprit);
    match (failure, culprits.next()) {
        (Some(failure), _) if failure.exit.starts_with("was killed") => Some(failure.rank),
        (_, Some(culprit)) if culprits.all(|other| other == culprit) => Some(culprit),
        (failure, _) => failure.map(|failure| failure.rank),
    }
}

fn log_of(run: &RunFolder, rank: usize) -> Vec<String> {
    let logs = run.logs();
    let log = logs.iter().find(|log| log.rank == rank);
    let lines = log.and_then(|log| log.tail(200, "").ok()).unwrap_or_default();
    lines.into_iter().map(|line| line.text).collect()
}

/// The operation in which the rank failed, or in which the others waited for it.
fn operation(flights: &[FlightRecord], rank: Option<usize>) -> Option<String> {
    let own = flights.iter().find(|flight| Some(flight.rank) == rank);
    let flight = own.or(flights.first())?;
    let open = flight.last_open()?;
    let unit = MemoryUnit::of(open.bytes);
    Some(format!(
        "rank {} in {} #{} of group {} ({} {unit}, {})",
        flight.rank,
        open.kind,
        open.sequence,
        open.group,
        unit.number(open.bytes),
        open.algo
    ))
}

/// Adds the ledger and the cheapest ways to fit.
fn memory(problem: &mut Problem, run: &RunFolder, plan: &Plan, machine: Option<&Cluster>) {
    let ledger = Ledger::largest(plan);
    problem.ledger = [
        ("parameters", ledger.parameters),
        ("gradients", ledger.gradients),
        ("optimizer", ledger.optimizer),
        ("activations", ledger.activations),
        ("gathered", ledger.gathered),
        ("compression", ledger.compressor_state),
        ("snapshot", ledger.snapshot),
        ("offloaded", ledger.offloaded.total()),
    ]
    .into_iter()
    .filter(|(_, bytes)| *bytes > 0)
    .map(|(name, bytes)| (name.to_string(), bytes as u64))
    .collect();
    let measured = Measured::of(run, plan).unwrap_or(Measured { step: 1.0, ..Measured::default() });
    let calibrated = calibrate(plan, &measured, machine);
    problem.fixes = memory_fixes(plan, &calibrated);
}

fn memory_fixes(plan: &Plan, calibrated: &Calibrated) -> Vec<MemoryFix> {
    let fix = |(sets, saved, slower): (Vec<String>, f64, f64)| MemoryFix {
        set: sets.join(" "),
        saved: saved as u64,
        slower,
    };
    ways_to_fit(plan, calibrated).into_iter().map(fix).collect()
}

/// The cheapest ways in which a plan needs less memory, at most three, before anything was measured. Step times are
/// compared with the constants of an H200, or of a generic CPU.
pub fn cheapest_memory_fixes(plan: &Plan) -> Vec<MemoryFix> {
    let measured = Measured { step: 1.0, ..Measured::default() };
    let gpu = Cluster::built_in("h200").filter(|_| plan.device.kind == DeviceType::Cuda);
    let calibrated = match gpu {
        // Not calibrated: nothing was measured.
        Some(cluster) => {
            let options = Options::default();
            let base = estimate(plan, &cluster, &options);
            Calibrated {
                machine_links: cluster.links.clone(),
                cluster,
                options,
                base,
                described: false,
                stream_rate: None,
                moved: Vec::new(),
                target: 1.0,
            }
        }
        None => calibrate(plan, &measured, None),
    };
    memory_fixes(plan, &calibrated)
}

impl std::fmt::Display for MemoryFix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let MemoryFix { set, saved, slower } = self;
        let gib = *saved as f64 / (1u64 << 30) as f64;
        write!(f, "--set {set}: {gib:.1} GiB less per rank, step time {:+.0}%", 100.0 * slower)
    }
}

/// The last checkpoint could not be saved. The run goes on, but a failure would cost more than it should.
fn failed_save(run: &RunFolder) -> Option<Problem> {
    let text = failed_save_in_metrics(run).or_else(|| failed_save_in_log(run))?;
    let found = patterns::find(&[&text]);
    let rank = text.strip_prefix("rank ").and_then(|rest| rest.split(':').next()?.parse().ok());
    Some(Problem {
        kind: found.as_ref().map_or(FailureKind::FailedSave, |(pattern, _)| pattern.kind),
        class: FailureClass::Infrastructure,
        reason: None,
        samples: Vec::new(),
        rank,
        exit: None,
        message: format!("the last checkpoint could not be saved: {text}"),
        operation: None,
        waited: Vec::new(),
        log: Vec::new(),
        action: found
            .map_or("check the storage of the run folder".into(), |(p, _)| p.action.into()),
        ledger: Vec::new(),
        fixes: Vec::new(),
        failures: run.failures.len(),
    })
}

/// The reason of the last save in the metrics, if it failed.
fn failed_save_in_metrics(run: &RunFolder) -> Option<String> {
    let mut saves = run.metrics.reports.iter().rev().map(|report| &report.more);
    let last =
        saves.find(|more| more.contains_key("save_failed") || more.contains_key("saved_step"))?;
    Some(last.get("save_failed")?.as_str()?.to_string())
}

/// The same from the log of rank 0: metrics cannot be written to a full disk.
fn failed_save_in_log(run: &RunFolder) -> Option<String> {
    let log = log_of(run, 0);
    let is_save = |line: &&String| line.contains(NOT_SAVED) || line.starts_with("saved ");
    let (_, text) = log.iter().rev().find(is_save)?.split_once(NOT_SAVED)?;
    Some(text.to_string())
}

/// Part of the warning about a checkpoint that could not be saved, before the rank.
const NOT_SAVED: &str = " was not saved: ";

/// A run whose process is alive but reports nothing.
fn stuck(run: &RunFolder) -> Problem {
    let (step, _) = run.progress();
    Problem {
        kind: FailureKind::Stuck,
        class: FailureClass::Unknown,
        reason: None,
        samples: Vec::new(),
        rank: first_failing(run, None),
        exit: None,
        message: format!("no report since step {step}, but the training process is alive"),
        operation: operation(&run.flights, None),
        waited: Vec::new(),
        log: run.logs().first().map_or(Vec::new(), |log| {
            let lines = log.tail(LINES, "").unwrap_or_default();
            lines.into_iter().map(|line| line.text).collect()
        }),
        action: "a rank that hangs is detected after comm.timeout_s and named in the logs; an evaluation, a large \
                 checkpoint or slow storage may also take this long"
            .into(),
        ledger: Vec::new(),
        fixes: Vec::new(),
        failures: run.failures.len(),
    }
}
