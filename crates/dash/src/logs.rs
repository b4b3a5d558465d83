//! The logs of the ranks.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Bytes that are read from the end of a log.
const TAIL_BYTES: u64 = 256 << 10;

/// The log file of a rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankLog {
    pub rank: usize,
    pub path: PathBuf,
}

/// A line with its number, counted from the first line that was read.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct LogLine {
    pub rank: usize,
    pub text: String,
}

/// The logs in a directory, by rank.
pub(crate) fn rank_logs(logs: &Path) -> Vec<RankLog> {
    let entries = std::fs::read_dir(logs).into_iter().flatten().flatten();
    let rank = |path: &Path| -> Option<usize> {
        let name = path.file_name()?.to_str()?;
        name.strip_prefix("rank-")?.strip_suffix(".log")?.parse().ok()
    };
    let mut found: Vec<RankLog> = entries
        .filter_map(|entry| Some(RankLog { rank: rank(&entry.path())?, path: entry.path() }))
        .collect();
    found.sort_by_key(|log| log.rank);
    found
}

impl RankLog {
    /// The last lines that contain `search`, which may be empty.
    pub fn tail(&self, lines: usize, search: &str) -> io::Result<Vec<LogLine>> {
        let mut file = File::open(&self.path)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes);
        // The first line may be incomplete.
        let skip = usize::from(len > TAIL_BYTES);
        let matching: Vec<LogLine> = text
            .lines()
            .skip(skip)
            .filter(|line| line.contains(search))
            .map(|line| LogLine { rank: self.rank, text: line.to_string() })
            .collect();
        Ok(matching[matching.len().saturating_sub(lines)..].to_vec())
    }
}
