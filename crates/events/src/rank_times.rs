//! `ranks.jsonl`: the times and the memory of every rank, one line per report. Kept apart from `metrics.jsonl`, because a
//! line grows with the number of ranks.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::append::append;

/// Times of all ranks in milliseconds per step, and peak memory in bytes, by rank.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RankTimes {
    pub step: usize,
    /// Everything except exposed communication.
    pub compute_ms: Vec<f32>,
    /// Exposed communication.
    pub wait_ms: Vec<f32>,
    /// Waiting for messages of other pipeline stages; a part of `wait_ms`. Empty without a pipeline.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pipe_ms: Vec<f32>,
    /// Reading samples; a part of `compute_ms`.
    pub read_ms: Vec<f32>,
    /// Time in which the rank could have run but the host had no free core.
    pub queue_ms: Vec<f32>,
    pub memory: Vec<u64>,
    /// Loads of the experts by layer, relative to the mean of the layer. Empty without experts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<Vec<f32>>,
}

/// A file opened for appending.
pub struct RankTimesFile(File);

impl RankTimesFile {
    /// Opens the file for a run that continues after `step`, and removes the lines of later steps.
    pub fn open_after(path: &Path, step: u64) -> io::Result<RankTimesFile> {
        let earlier: Vec<RankTimes> = match path.exists() {
            true => read_rank_times(path)?,
            false => Vec::new(),
        };
        let kept = earlier.iter().filter(|times| times.step as u64 <= step).count();
        if kept < earlier.len() {
            let mut text = Vec::new();
            for times in &earlier[..kept] {
                serde_json::to_writer(&mut text, times)?;
                text.push(b'\n');
            }
            std::fs::write(path, text)?;
        }
        Ok(RankTimesFile(OpenOptions::new().append(true).create(true).open(path)?))
    }

    pub fn write(&mut self, times: &RankTimes) -> io::Result<()> {
        let mut line = serde_json::to_vec(times)?;
        line.push(b'\n');
        append(&mut self.0, &line)
    }
}

/// Reads all complete lines. Lines that are damaged are skipped.
pub fn read_rank_times(path: &Path) -> io::Result<Vec<RankTimes>> {
    let bytes = std::fs::read(path)?;
    let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).collect())
}

/// Bytes at the end of the file that hold the last lines.
const LAST_BYTES: u64 = 1 << 20;

/// Reads the lines in the last MiB of the file, which takes the same time for all lengths of a run.
pub fn read_last_rank_times(path: &Path) -> io::Result<Vec<RankTimes>> {
    let mut file = File::open(path)?;
    let start = file.metadata()?.len().saturating_sub(LAST_BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    // The first line may be incomplete and is then damaged.
    let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).collect())
}
