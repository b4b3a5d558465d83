//! Output of rank 0 during training: a line per event, and a progress bar on a terminal.

use std::io::Write as _;

use lockstep_events::StepReport;
use lockstep_plan::Plan;
use lockstep_trainer::{Event, SavedCheckpoint};

use crate::commands::prediction::Measured;
use crate::print::{print_error, print_line};

/// Prints the model, the layout and the batch, and the entropy of the data if it is known.
pub fn print_header(plan: &Plan, entropy: Option<f64>) {
    let (model, train) = (&plan.model, &plan.train);
    print_line!(
        "{}: {:?}, {:.2}M parameters, {} rank(s) × {} thread(s), {:?}, {} × {} tokens per step",
        plan.name,
        model.family,
        model.param_count() as f64 / 1e6,
        plan.ranks,
        train.threads,
        plan.precision.compute,
        train.global_batch,
        plan.data.seq,
    );
    if let Some(entropy) = entropy {
        print_line!("entropy of the data: {entropy:.4} nats per token (the lowest possible loss)");
    }
}

/// Prints events, and a progress bar if standard error is a terminal.
pub struct Output {
    terminal: bool,
    entropy: Option<f64>,
    bar_drawn: bool,
    /// Throughput and traffic of the printed steps.
    pub measured: Measured,
}

/// Characters of the progress bar.
const BAR_WIDTH: usize = 24;

impl Output {
    pub fn new(terminal: bool, entropy: Option<f64>) -> Output {
        Output { terminal, entropy, bar_drawn: false, measured: Measured::default() }
    }

    pub fn show(&mut self, event: &Event<'_>) {
        self.clear();
        match event {
            Event::Step(report) => {
                self.measured.add(report);
                print_line!("{report}");
                self.draw(report);
            }
            Event::Evaluated(report) => {
                let above = match (self.entropy, report.eval_loss) {
                    (Some(entropy), Some(loss)) => {
                        format!(" | {:.1}% above the entropy", 100.0 * (loss / entropy - 1.0))
                    }
                    _ => String::new(),
                };
                print_line!("{report}{above}");
            }
            Event::Saved(saved) => print_line!("{}", saved_line(saved)),
            Event::SaveFailed { step, rank, what } => print_error!(
                "warning: the checkpoint of step {step} was not saved: rank {rank}: {what}; training continues, and \
                 the previous checkpoint is kept"
            ),
            Event::SkippedCheckpoint { path, rank, what } => print_error!(
                "warning: skipped {}: rank {rank}: {what}; trying an older checkpoint",
                path.display()
            ),
            Event::Slow(slow) => print_error!("warning: {slow}"),
        }
        // Standard output may be a pipe to the launcher, which forwards it.
        let _ = std::io::stdout().flush();
    }

    fn draw(&mut self, report: &StepReport) {
        if !self.terminal || report.step == report.steps {
            return;
        }
        let filled = BAR_WIDTH * report.step / report.steps.max(1);
        let percent = 100 * report.step / report.steps.max(1);
        let bar = format!("{}{}", "█".repeat(filled), "░".repeat(BAR_WIDTH - filled));
        // A closed terminal is not an error.
        let _ = write!(std::io::stderr(), "{bar} {percent}%");
        self.bar_drawn = true;
    }

    /// Removes the progress bar.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.bar_drawn) {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

fn saved_line(saved: &SavedCheckpoint) -> String {
    let (mib, seconds) = (saved.bytes as f64 / (1 << 20) as f64, saved.time.as_secs_f64());
    format!(
        "saved {} | {mib:.1} MiB in {seconds:.2} s | stalled {:.1} ms",
        saved.path.display(),
        1e3 * saved.stall.as_secs_f64()
    )
}
