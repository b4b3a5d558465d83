//! Records of failures: `logs/failures.jsonl` of the launcher, and the flight records of the ranks.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The first rank that failed in a generation, as the launcher saw it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FailureRecord {
    pub rank: usize,
    pub generation: u32,
    /// `exited with code 1`, `was killed by SIGKILL`.
    pub exit: String,
    pub code: i32,
    /// Processes that the kernel killed because memory ran out.
    pub oom_kills: Option<u64>,
    /// Last lines of its output.
    pub tail: Vec<String>,
    /// Seconds since 1970.
    pub time: u64,
}

/// The verdict of `lockstep train --replay-step`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ReplayRecord {
    pub step: u64,
    /// The two replays have different bits, first on `ranks`.
    pub differs: bool,
    pub ranks: Vec<usize>,
    /// The step is finite when it is replayed.
    pub finite: bool,
    /// Samples whose loss is not finite, by index in the global batch.
    pub samples: Vec<usize>,
}

/// The last operations of a rank when its world broke.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FlightRecord {
    pub rank: usize,
    /// The rank that the others blame.
    pub culprit: Option<usize>,
    pub cause: Option<serde_json::Value>,
    pub error: String,
    pub operations: Vec<FlightOperation>,
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FlightOperation {
    pub sequence: u64,
    pub group: String,
    pub kind: String,
    pub algo: String,
    pub bytes: u64,
    pub started_us: u64,
    pub finished_us: Option<u64>,
    pub failed: bool,
}

impl FlightRecord {
    /// The operation that failed, or that was in progress.
    pub fn last_open(&self) -> Option<&FlightOperation> {
        let open =
            |operation: &&FlightOperation| operation.failed || operation.finished_us.is_none();
        self.operations.iter().rev().find(open)
    }
}

/// All failures of a run, oldest first.
pub(crate) fn failures(logs: &Path) -> Vec<FailureRecord> {
    json_lines(&logs.join("failures.jsonl"))
}

/// All replays of steps, oldest first.
pub(crate) fn replays(logs: &Path) -> Vec<ReplayRecord> {
    json_lines(&logs.join(REPLAYS))
}

/// Name of the file of replays in the log directory.
pub const REPLAYS: &str = "replays.jsonl";

/// The records of a file, without damaged lines.
fn json_lines<T: DeserializeOwned>(path: &Path) -> Vec<T> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// The flight records of a run, by rank.
pub(crate) fn flights(logs: &Path) -> Vec<FlightRecord> {
    let entries = std::fs::read_dir(logs).into_iter().flatten().flatten();
    let mut records: Vec<FlightRecord> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.starts_with("flight-rank-") && name.ends_with(".json")
        })
        .filter_map(|path| serde_json::from_slice(&std::fs::read(path).ok()?).ok())
        .collect();
    records.sort_by_key(|record| record.rank);
    records
}
