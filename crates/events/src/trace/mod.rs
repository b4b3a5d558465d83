//! Timelines: the spans of all ranks in a few steps. Each rank writes a file into `RUN/trace/steps-A-B`; rank 0 merges
//! them into `RUN/trace/steps-A-B.json.gz`, which Perfetto and chrome://tracing open. [`Timeline`] reads the files of
//! the ranks on a common clock, and the other modules explain it.

mod breakdown;
mod chrome;
mod clock;
mod critical_path;
mod rank_file;
mod text;
mod timeline;

pub use breakdown::{AxisTime, Breakdown, KernelTime};
pub use chrome::write_chrome;
pub use clock::{ClockFit, ClockSample};
pub use critical_path::{CriticalPath, PathPart};
pub use rank_file::{FileCall, FileSpan, MemoryCounter, RankTrace, StepTime, ThreadName};
pub use text::{compare, report};
pub use timeline::{CallSplit, Timeline};

use std::path::{Path, PathBuf};

/// Directory of timelines in a run folder.
pub const TRACE_DIR: &str = "trace";

/// Name of a file in [`TRACE_DIR`] that asks a running job for a timeline of the next steps.
pub const TRACE_REQUEST: &str = "request";

/// Directory of the rank files of a timeline.
pub fn trace_folder(run: &Path, first: u64, last: u64) -> PathBuf {
    run.join(TRACE_DIR).join(format!("steps-{first}-{last}"))
}

/// Path of the merged file of a timeline.
pub fn merged_path(folder: &Path) -> PathBuf {
    folder.with_extension("json.gz")
}

/// The timelines of a run folder, by first step.
pub fn trace_folders(run: &Path) -> Vec<PathBuf> {
    let first_step = |path: &PathBuf| -> Option<(u64, u64)> {
        let name = path.file_name()?.to_str()?.strip_prefix("steps-")?;
        let (first, last) = name.split_once('-')?;
        Some((first.parse().ok()?, last.parse().ok()?))
    };
    let entries = std::fs::read_dir(run.join(TRACE_DIR)).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .map(|entry| entry.path())
        .filter_map(|path| Some((first_step(&path).filter(|_| path.is_dir())?, path)))
        .collect();
    found.sort();
    found.into_iter().map(|(_, path)| path).collect()
}
