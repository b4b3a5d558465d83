//! `metrics.jsonl`: one report per line. Each `write` is one write to the file; a crash can truncate at most the last
//! line, and both writer and reader tolerate that.

use crate::StepReport;
use crate::append::append;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// A metrics file opened for appending.
pub struct Metrics {
    file: File,
    path: PathBuf,
}

impl Metrics {
    /// Opens the file for appending and removes a truncated last line.
    pub fn open(path: &Path) -> io::Result<Metrics> {
        let open = || {
            let mut file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
            let end = whole_lines(&mut file)?;
            file.set_len(end)?;
            Ok(file)
        };
        let file = open().map_err(|error| about("open", path, error))?;
        Ok(Metrics { file, path: path.to_path_buf() })
    }

    /// Opens the file for a run that resumes after `step` and removes the reports of later steps. The file is replaced
    /// atomically; a process of an older generation that still has it open writes to the old file.
    pub fn open_after(path: &Path, step: u64) -> io::Result<Metrics> {
        let cut = || {
            let bytes = match std::fs::read(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                read => read?,
            };
            let aside = path.with_extension("jsonl.partial");
            let mut file = File::create(&aside)?;
            file.write_all(&up_to(&bytes, step))?;
            file.sync_all()?;
            std::fs::rename(&aside, path)
        };
        cut().map_err(|error| about("shorten", path, error))?;
        Metrics::open(path)
    }

    /// Appends one line. NaN and infinity are written as null.
    pub fn write(&mut self, report: &StepReport) -> io::Result<()> {
        let mut line = serde_json::to_vec(report)?;
        line.push(b'\n');
        // One write, so that `tail -f` shows complete lines.
        append(&mut self.file, &line).map_err(|error| about("write", &self.path, error))
    }
}

/// Reads all reports of a file, except a truncated last line.
pub fn read(path: &Path) -> io::Result<Vec<StepReport>> {
    let bytes = std::fs::read(path).map_err(|error| about("read", path, error))?;
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let mut reports = Vec::new();
    for (index, line) in bytes[..whole].split_inclusive(|byte| *byte == b'\n').enumerate() {
        let report = serde_json::from_slice(line).map_err(|error| {
            let text = format!("{} line {}: {error}", path.display(), index + 1);
            io::Error::new(io::ErrorKind::InvalidData, text)
        })?;
        reports.push(report);
    }
    // The last line may lack only its line end.
    reports.extend(serde_json::from_slice::<StepReport>(&bytes[whole..]).ok());
    Ok(reports)
}

/// The complete lines up to `step`. Lines that are not reports are kept.
fn up_to(bytes: &[u8], step: u64) -> Vec<u8> {
    let later = |line: &&[u8]| {
        let report = serde_json::from_slice::<StepReport>(line);
        report.is_ok_and(|report| report.step as u64 > step)
    };
    let lines = bytes.split_inclusive(|byte| *byte == b'\n');
    lines
        .filter(|line| line.ends_with(b"\n"))
        .filter(|line| !later(line))
        .flatten()
        .copied()
        .collect()
}

/// Offset of the end of the last complete line.
fn whole_lines(file: &mut File) -> io::Result<u64> {
    let mut end = file.seek(SeekFrom::End(0))?;
    let mut buffer = [0; 4096];
    while end > 0 {
        let start = end.saturating_sub(buffer.len() as u64);
        let chunk = &mut buffer[..(end - start) as usize];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(chunk)?;
        if let Some(at) = chunk.iter().rposition(|byte| *byte == b'\n') {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

fn about(act: &str, path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot {act} {}: {error}", path.display()))
}
