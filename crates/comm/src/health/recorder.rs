//! Flight recorder: keeps the last operations of a rank and writes them as JSON when the world breaks.

use crate::call::Call;
use crate::call::error::Error;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Number of operations kept.
const KEPT: usize = 1000;

/// One recorded operation.
#[derive(Clone, Debug, Serialize)]
pub struct FlightEntry {
    pub sequence: u64,
    pub group: Arc<str>,
    pub kind: &'static str,
    pub algo: &'static str,
    pub dtype: Option<&'static str>,
    pub bytes: u64,
    /// Microseconds since the rank joined.
    pub started_us: u64,
    pub finished_us: Option<u64>,
    pub failed: bool,
}

/// Contents of the file.
#[derive(Serialize)]
struct Report<'a> {
    rank: usize,
    culprit: Option<usize>,
    cause: Option<crate::call::error::Cause>,
    error: String,
    operations: &'a [FlightEntry],
}

pub(crate) struct Recorder {
    rank: usize,
    since: Instant,
    folder: Option<PathBuf>,
    log: Mutex<Log>,
}

#[derive(Default)]
struct Log {
    /// Operations recorded in total; the n-th is stored at index n % KEPT.
    count: usize,
    entries: Vec<FlightEntry>,
    written: bool,
}

impl Recorder {
    pub(crate) fn new(rank: usize, folder: Option<PathBuf>) -> Recorder {
        // Allocated in advance, so that recording does not allocate.
        let log = Log { entries: Vec::with_capacity(KEPT), ..Log::default() };
        Recorder { rank, since: Instant::now(), folder, log: Mutex::new(log) }
    }

    fn log(&self) -> std::sync::MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Records the start of an operation; returns its number.
    pub(crate) fn begin(&self, call: &Call, group: &Arc<str>) -> usize {
        let entry = FlightEntry {
            sequence: call.sequence,
            group: group.clone(),
            kind: call.kind.name(),
            algo: call.algo.name(),
            dtype: call.dtype.map(|d| d.name()),
            bytes: call.bytes(),
            started_us: self.since.elapsed().as_micros() as u64,
            finished_us: None,
            failed: false,
        };
        let mut log = self.log();
        let number = log.count;
        log.count += 1;
        if log.entries.len() < KEPT {
            log.entries.push(entry);
        } else {
            log.entries[number % KEPT] = entry;
        }
        number
    }

    pub(crate) fn end(&self, number: usize, error: Option<&Error>) {
        let now = self.since.elapsed().as_micros() as u64;
        let mut log = self.log();
        // The entry of a long operation may have been overwritten.
        if log.count - number <= KEPT {
            let entry = &mut log.entries[number % KEPT];
            entry.finished_us = Some(now);
            entry.failed = error.is_some();
        }
        let first = error.is_some() && !std::mem::replace(&mut log.written, error.is_some());
        drop(log);
        if let (true, Some(error)) = (first, error) {
            self.report(error);
        }
    }

    /// The recorded operations, oldest first.
    pub(crate) fn entries(&self) -> Vec<FlightEntry> {
        let log = self.log();
        let mut entries = log.entries.clone();
        if log.count > KEPT {
            entries.rotate_left(log.count % KEPT);
        }
        entries
    }

    /// Logs the failure and writes the file.
    fn report(&self, error: &Error) {
        match error.culprit() {
            Some(culprit) => tracing::error!("caused by rank {culprit}: {error}"),
            None => tracing::error!("{error}"),
        }
        let Some(folder) = &self.folder else { return };
        let path = folder.join(format!("flight-rank-{}.json", self.rank));
        match self.write(&path, error) {
            Ok(()) => tracing::error!("flight record written to {}", path.display()),
            Err(e) => tracing::error!("cannot write the flight record {}: {e}", path.display()),
        }
    }

    fn write(&self, path: &Path, error: &Error) -> std::io::Result<()> {
        let operations = self.entries();
        let report = Report {
            rank: self.rank,
            culprit: error.culprit(),
            cause: error.cause(),
            error: error.to_string(),
            operations: &operations,
        };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(path, serde_json::to_vec_pretty(&report)?)
    }
}
