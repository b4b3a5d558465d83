//! Output of rank 0 during a training of trees: a line per event, and a progress bar on a terminal.

use std::cell::RefCell;
use std::io::Write as _;

use lockstep_events::{StepReport, duration, thousands};
use lockstep_gbdt::{Config, Event, Finished, Matrix, Progress, Storage};

use crate::commands::output::Bar;
use crate::print::{print_error, print_line};

/// Prints events.
pub struct Output<'a> {
    pub config: &'a Config,
    pub ranks: usize,
    pub threads: usize,
    pub bar: RefCell<Bar>,
}

impl Output<'_> {
    pub fn show(&self, event: &Event<'_>) {
        let mut bar = self.bar.borrow_mut();
        bar.clear();
        match event {
            Event::Data { matrix, cached, seconds } => self.data(matrix, *cached, *seconds),
            Event::Resumed { round } => print_line!("resumed after round {round}"),
            Event::Skipped { what } => {
                print_error!("warning: skipped {what}; trying an older checkpoint")
            }
            Event::Round { progress, report } => {
                print_line!("{}", self.round(progress, report));
                bar.draw(report);
            }
            Event::Saved { path } => print_line!("saved {}", path.display()),
            Event::SaveFailed { round, what } => print_error!(
                "warning: the checkpoint of round {round} was not saved: {what}; training continues"
            ),
        }
        // Standard output may be a pipe to the launcher, which forwards it.
        let _ = std::io::stdout().flush();
    }

    fn data(&self, matrix: &Matrix, cached: bool, seconds: f64) {
        let sparse =
            matrix.layout.storage.iter().filter(|storage| **storage == Storage::Sparse).count();
        print_line!(
            "{}: {} rows × {} features ({sparse} sparse), {} rank(s) × {} thread(s)",
            self.config.name.as_deref().unwrap_or_default(),
            thousands(matrix.total_rows as f64),
            thousands(matrix.features.len() as f64),
            self.ranks,
            self.threads,
        );
        let mib = matrix.stored_bytes() as f64 / (1 << 20) as f64;
        let done = if cached { "mapped the bins of an earlier start" } else { "read and binned" };
        print_line!("{done} in {seconds:.2} s: {mib:.1} MiB on rank 0");
        if let Some(generate) = self.config.data.generate {
            let rows = match generate.eval_rows {
                0 => 0..generate.rows,
                rows => generate.rows..generate.rows + rows,
            };
            let (entropy, best) = (generate.entropy(rows.clone()), generate.true_logloss(rows));
            print_line!(
                "entropy of the labels: {entropy:.4} nats; the true probabilities have a logloss of {best:.4}"
            );
        }
    }

    fn round(&self, progress: &Progress, report: &StepReport) -> String {
        let mut line = format!("round {}/{}", report.step, report.steps);
        for (name, value) in &progress.metrics {
            line += &format!(" | {name} {value:.5}");
        }
        if let Some(eta) = report.eta {
            line += &format!(" | eta {}", duration(eta));
        }
        line
    }

    /// Removes the progress bar.
    pub fn clear(&self) {
        self.bar.borrow_mut().clear();
    }

    /// Prints the end of a run.
    pub fn finished(&self, finished: &Finished) {
        let trees = finished.model.trees.len();
        let sent = finished.sent_bytes as f64 / (1 << 20) as f64;
        print_line!(
            "{trees} trees in {:.2} s; rank 0 sent {sent:.1} MiB during training",
            finished.seconds
        );
        if let Some((value, round)) = finished.progress.best {
            print_line!("best round {}: {value:.5}", round + 1);
        }
    }
}
