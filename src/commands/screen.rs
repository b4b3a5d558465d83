//! What rank 0 shows of a training as it goes: its lines, and a bar when somebody watches. Decides nothing.

use std::io::Write as _;

use lockstep_events::StepReport;
use lockstep_plan::Plan;
use lockstep_trainer::{Event, SavedCheckpoint};

use crate::commands::predicted::Measured;
use crate::print::{print_error, print_line};

/// What is about to be trained, and the lowest loss that there is, where it is known.
pub fn introduce(plan: &Plan, floor: Option<f64>) {
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
    if let Some(floor) = floor {
        print_line!(
            "the true entropy of this data is {floor:.4} nats per token: no model's loss stays below it"
        );
    }
}

/// Rank 0's words, and its bar when somebody watches.
pub struct Screen {
    terminal: bool,
    floor: Option<f64>,
    drawn: bool,
    /// What the steps that were shown came to.
    pub measured: Measured,
}

const BAR: usize = 24;

impl Screen {
    /// `floor` is the entropy of the data.
    pub fn new(terminal: bool, floor: Option<f64>) -> Screen {
        Screen { terminal, floor, drawn: false, measured: Measured::default() }
    }

    pub fn show(&mut self, event: &Event<'_>) {
        self.clear();
        match event {
            Event::Step(report) => {
                self.measured.take(report);
                print_line!("{report}");
                self.draw(report);
            }
            Event::Evaluated(report) => {
                let above = match (self.floor, report.eval_loss) {
                    (Some(floor), Some(loss)) => {
                        format!(" | {:.1}% above the entropy", 100.0 * (loss / floor - 1.0))
                    }
                    _ => String::new(),
                };
                print_line!("{report}{above}");
            }
            Event::Saved(saved) => print_line!("{}", saved_line(saved)),
            Event::SaveFailed { step, rank, what } => print_error!(
                "warning: the checkpoint of step {step} was not saved: rank {rank}: {what}; the one before stands, \
                 and the training goes on"
            ),
            Event::SkippedCheckpoint { path, rank, what } => print_error!(
                "warning: skipped {}: rank {rank}: {what}; trying an older checkpoint",
                path.display()
            ),
            Event::Slow(slow) => print_error!("warning: {slow}"),
        }
        // Standard output may be a pipe to the launcher, which shows what it gets.
        let _ = std::io::stdout().flush();
    }

    fn draw(&mut self, report: &StepReport) {
        if !self.terminal || report.step == report.steps {
            return;
        }
        let filled = BAR * report.step / report.steps.max(1);
        let percent = 100 * report.step / report.steps.max(1);
        let bar = format!("{}{}", "█".repeat(filled), "░".repeat(BAR - filled));
        // A terminal that went away is no reason to fail.
        let _ = write!(std::io::stderr(), "{bar} {percent}%");
        self.drawn = true;
    }

    /// Takes the bar away.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.drawn) {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

/// Where, how much, how fast, and what it cost the training.
fn saved_line(saved: &SavedCheckpoint) -> String {
    let (mib, seconds) = (saved.bytes as f64 / (1 << 20) as f64, saved.time.as_secs_f64());
    format!(
        "saved {} | {mib:.1} MiB in {seconds:.2} s | stalled {:.1} ms",
        saved.path.display(),
        1e3 * saved.stall.as_secs_f64()
    )
}
