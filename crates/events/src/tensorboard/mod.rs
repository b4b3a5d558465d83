//! TensorBoard event files with scalars, as read by `tensorboard --logdir`. No graphs, images or histograms.

mod crc;
mod event;

use crate::StepReport;
use crate::append::append;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// An event file opened for writing.
pub struct TensorBoard {
    file: File,
}

impl TensorBoard {
    /// Creates a new file in `dir`. TensorBoard merges the files of a folder, so a resumed run creates another file.
    pub fn create(dir: &Path) -> io::Result<TensorBoard> {
        let now = now();
        // The name must contain `tfevents`; TensorBoard reads files in name order.
        let (seconds, nanos, process) = (now.as_secs(), now.subsec_nanos(), std::process::id());
        let path = dir.join(format!("events.out.tfevents.{seconds:010}.{nanos:09}.{process}"));
        let about = |error: io::Error| {
            io::Error::new(error.kind(), format!("cannot write {}: {error}", path.display()))
        };
        let create = || {
            fs::create_dir_all(dir)?;
            let mut file = File::create_new(&path)?;
            file.write_all(&event::record(&event::version(now.as_secs_f64())))?;
            Ok(file)
        };
        Ok(TensorBoard { file: create().map_err(about)? })
    }

    /// Creates a file for a run that resumes after `step`. Later steps in earlier files are discarded by readers.
    pub fn create_after(dir: &Path, step: u64) -> io::Result<TensorBoard> {
        let mut board = TensorBoard::create(dir)?;
        if step > 0 {
            let start = event::session_start(now().as_secs_f64(), step as i64 + 1);
            board.file.write_all(&event::record(&start))?;
        }
        Ok(board)
    }

    /// Appends the values of a report.
    pub fn write(&mut self, report: &StepReport) -> io::Result<()> {
        let mem = report.mem_bytes.map(|bytes| bytes as f64);
        let numbers = [
            ("train/loss", report.loss),
            ("train/grad_norm", report.grad_norm),
            ("train/lr", report.lr),
            ("eval/loss", report.eval_loss),
            ("speed/tokens_per_s", report.tokens_per_s),
            ("speed/mfu", report.mfu),
            ("speed/comm_exposed", report.comm_exposed),
            ("experts/load_min", report.expert_load_min),
            ("experts/load_max", report.expert_load_max),
            ("experts/imbalance", report.expert_imbalance),
            ("experts/dropped_fraction", report.dropped_fraction),
            ("memory/bytes", mem),
        ];
        let more = report.more.iter().map(|(tag, value)| (tag.as_str(), value.as_f64()));
        let numbers = numbers.into_iter().chain(more);
        let known: Vec<(&str, f64)> =
            numbers.filter_map(|(tag, number)| Some((tag, number?))).collect();
        if known.is_empty() {
            return Ok(());
        }
        let scalars = event::scalars(now().as_secs_f64(), report.step as i64, &known);
        append(&mut self.file, &event::record(&scalars))
    }
}

/// Time since the Unix epoch.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
