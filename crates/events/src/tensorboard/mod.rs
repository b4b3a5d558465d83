//! TensorBoard event files: records of scalars, as `tensorboard --logdir` reads them. Only what scalars
//! need of the formats is here: no graphs, images or histograms.

mod crc;
mod event;

use crate::StepReport;
use crate::append::append;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// One event file, being written.
pub struct TensorBoard {
    file: File,
}

impl TensorBoard {
    /// Starts a new file in `dir`. TensorBoard joins the files of a folder, so that a run that goes on
    /// takes another.
    pub fn create(dir: &Path) -> io::Result<TensorBoard> {
        let now = now();
        // The name must have `tfevents` in it; TensorBoard reads a folder's files in the order of names.
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

    /// The same for a run that goes on after `step`: what earlier files say of later steps counts no more.
    pub fn create_after(dir: &Path, step: u64) -> io::Result<TensorBoard> {
        let mut board = TensorBoard::create(dir)?;
        if step > 0 {
            let start = event::session_start(now().as_secs_f64(), step as i64 + 1);
            board.file.write_all(&event::record(&start))?;
        }
        Ok(board)
    }

    /// Appends the numbers of a report.
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
            ("memory/bytes", mem),
        ];
        let known: Vec<(&str, f64)> =
            numbers.into_iter().filter_map(|(tag, number)| Some((tag, number?))).collect();
        if known.is_empty() {
            return Ok(());
        }
        let scalars = event::scalars(now().as_secs_f64(), report.step as i64, &known);
        append(&mut self.file, &event::record(&scalars))
    }
}

/// Since 1970.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
