//! The flight recorder: the last operations of a rank, written down as JSON when the world breaks.
//! Never looked at while all is well.

use crate::call::Call;
use crate::call::error::Error;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Operations that are kept.
pub const KEPT: usize = 1000;

/// One operation as it is remembered.
#[derive(Clone, Debug, Serialize)]
pub struct Entry {
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

/// What is written when the world breaks.
#[derive(Serialize)]
struct Report<'a> {
    rank: usize,
    guilty: Option<usize>,
    cause: Option<crate::call::error::Cause>,
    error: String,
    operations: &'a [Entry],
}

pub(crate) struct Recorder {
    rank: usize,
    since: Instant,
    folder: Option<PathBuf>,
    log: Mutex<Log>,
}

#[derive(Default)]
struct Log {
    /// Operations ever recorded; the n-th lies at place n % KEPT.
    count: usize,
    entries: Vec<Entry>,
    written: bool,
}

impl Recorder {
    pub(crate) fn new(rank: usize, folder: Option<PathBuf>) -> Recorder {
        // Room for all that is kept: nothing is allocated while operations go by.
        let log = Log { entries: Vec::with_capacity(KEPT), ..Log::default() };
        Recorder { rank, since: Instant::now(), folder, log: Mutex::new(log) }
    }

    fn log(&self) -> std::sync::MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Writes down that an operation begins; gives its number.
    pub(crate) fn begin(&self, call: &Call, group: &Arc<str>) -> usize {
        let entry = Entry {
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
        // Long operations may have been overtaken by a thousand others.
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

    /// The operations kept, oldest first.
    pub(crate) fn entries(&self) -> Vec<Entry> {
        let log = self.log();
        let mut entries = log.entries.clone();
        if log.count > KEPT {
            entries.rotate_left(log.count % KEPT);
        }
        entries
    }

    /// One line for people, and the file for the rest.
    fn report(&self, error: &Error) {
        match error.guilty() {
            Some(guilty) => tracing::error!("guilty: rank {guilty}. {error}"),
            None => tracing::error!("{error}"),
        }
        let Some(folder) = &self.folder else { return };
        let path = folder.join(format!("flight-rank-{}.json", self.rank));
        match self.write(&path, error) {
            Ok(()) => tracing::error!("the last operations are in {}", path.display()),
            Err(e) => tracing::error!(
                "the last operations could not be written to {}: {e}",
                path.display()
            ),
        }
    }

    fn write(&self, path: &Path, error: &Error) -> std::io::Result<()> {
        let operations = self.entries();
        let report = Report {
            rank: self.rank,
            guilty: error.guilty(),
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
