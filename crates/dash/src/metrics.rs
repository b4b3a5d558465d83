//! Reads `metrics.jsonl` while it grows. A damaged line is skipped and counted; a truncated last line is read again when
//! it is complete.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use lockstep_events::StepReport;

/// A metrics file and the reports read so far.
#[derive(Debug, Default)]
pub struct MetricsReader {
    path: PathBuf,
    /// Bytes read, up to the end of the last complete line.
    offset: u64,
    pub reports: Vec<StepReport>,
    /// Lines that are not reports.
    pub damaged: usize,
}

impl MetricsReader {
    pub fn new(path: &Path) -> MetricsReader {
        MetricsReader { path: path.to_path_buf(), ..MetricsReader::default() }
    }

    /// A reader that skips all but the last `bytes` bytes, from the start of a line on.
    pub fn at_end(path: &Path, bytes: u64) -> io::Result<MetricsReader> {
        let mut reader = MetricsReader::new(path);
        let mut file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(reader),
            opened => opened?,
        };
        let len = file.metadata()?.len();
        if len > bytes {
            // One byte earlier, so that a line that begins there is kept.
            let start = file.seek(SeekFrom::Start(len - bytes - 1))?;
            reader.offset = start + BufReader::new(file).skip_until(b'\n')? as u64;
        }
        Ok(reader)
    }

    /// Reads what was appended since the last call and returns whether anything changed. A file that became shorter was
    /// replaced, because the run resumed from an earlier step, and is read from the start.
    pub fn update(&mut self) -> io::Result<bool> {
        let mut file = match File::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let changed = !self.reports.is_empty();
                *self = MetricsReader::new(&self.path);
                return Ok(changed);
            }
            opened => opened?,
        };
        let len = file.metadata()?.len();
        if len < self.offset {
            *self = MetricsReader::new(&self.path);
        }
        if len == self.offset {
            return Ok(false);
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        for line in bytes[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            match serde_json::from_slice(line) {
                Ok(report) => self.reports.push(report),
                Err(_) => self.damaged += 1,
            }
        }
        self.offset += whole as u64;
        Ok(whole > 0)
    }
}
