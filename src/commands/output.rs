//! Output of rank 0 during training: a line per event, and a progress bar on a terminal.

use std::io::Write as _;
use std::time::Duration;

use lockstep_data::{Source, Split};
use lockstep_events::{StepReport, duration, thousands};
use lockstep_plan::Plan;
use lockstep_trainer::{Event, FailedSave, SavedCheckpoint};

use crate::commands::prediction::Measured;
use crate::print::{print_error, print_line};

/// Prints the model, the layout, the batch and the data.
pub fn print_header(plan: &Plan, source: &Source) {
    let (model, train) = (&plan.model, &plan.train);
    print_line!(
        "{}: {}, {:.2}M parameters, {} rank(s) × {} thread(s), {}{}, {} × {} tokens per step",
        plan.name,
        model.family.name(),
        model.param_count() as f64 / 1e6,
        plan.ranks,
        train.threads,
        plan.precision.compute,
        if plan.precision.fp8.is_on() { " and fp8" } else { "" },
        train.global_batch,
        plan.data.seq,
    );
    if let Some(entropy) = source.entropy(plan.data.seq) {
        print_line!("entropy of the data: {entropy:.4} nats per token (the lowest possible loss)");
    }
    if let Some(epoch) = source.epoch_tokens(Split::Train) {
        print_line!(
            "data: {} tokens per epoch; {} steps are {:.2} epochs",
            thousands(epoch as f64),
            train.steps,
            (train.steps * plan.tokens_per_step()) as f64 / epoch as f64
        );
    }
}

/// Warns about data that does not fit the model.
pub fn print_warnings(plan: &Plan, source: &Source) {
    data_warnings(plan, source).iter().for_each(|warning| print_error!("warning: {warning}"));
}

/// Problems of the data that training does not stop for.
fn data_warnings(plan: &Plan, source: &Source) -> Vec<String> {
    let mut warnings = Vec::new();
    let seq = plan.data.seq;
    for (split, name) in [(Split::Train, "training"), (Split::HeldOut, "held-out")] {
        // Nothing held out is not evaluated.
        if let Some(tokens) =
            source.epoch_tokens(split).filter(|tokens| (1..=seq as u64).contains(tokens))
        {
            warnings.push(format!(
                "the {name} data has {} tokens, less than one sample of {}: every sample repeats it; use more data or \
                 a smaller data.seq",
                thousands(tokens as f64),
                thousands(seq as f64 + 1.0)
            ));
        }
    }
    let (model, data) = (&plan.model, source.vocab());
    // Vocabularies are often padded by a few tokens.
    if 2 * model.vocab > 3 * data {
        let tables = if model.tied { 1 } else { 2 };
        let unused = (model.vocab - data) * model.dim * tables;
        warnings.push(format!(
            "the model has a vocabulary of {}, but the data only {} tokens: {:.1}M of {:.1}M parameters are never used; \
             set model.vocab = {data}, or prepare the data with the tokenizer of the model",
            thousands(model.vocab as f64),
            thousands(data as f64),
            unused as f64 / 1e6,
            model.param_count() as f64 / 1e6
        ));
    }
    warnings
}

/// Output of rank 0 on the terminal.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// A line per event.
    Text,
    /// The verdict at the end.
    Quiet,
    /// A JSON object per report.
    Json,
}

/// Prints events, and a progress bar if standard error is a terminal.
pub struct Output {
    style: Style,
    bar: Bar,
    entropy: Option<f64>,
    /// Throughput and traffic of the printed steps.
    pub measured: Measured,
}

/// Seconds after which a step is announced, so that a silent start does not look like a hang.
const LONG_STEP_S: f64 = 5.0;

/// Characters of the progress bar.
const BAR_WIDTH: usize = 24;

impl Output {
    pub fn new(style: Style, terminal: bool, entropy: Option<f64>) -> Output {
        let bar = Bar::new(terminal && style == Style::Text);
        Output { style, bar, entropy, measured: Measured::default() }
    }

    pub fn show(&mut self, event: &Event<'_>) {
        self.clear();
        if let Event::Step(report) = event {
            self.measured.add(report);
        }
        match (self.style, event) {
            (Style::Text, _) => self.print(event),
            (Style::Json, Event::Step(report) | Event::Evaluated(report)) => {
                print_line!("{}", serde_json::to_string(report).expect("a report is plain data"));
            }
            _ => print_warning(event),
        }
        // Standard output may be a pipe to the launcher, which forwards it.
        let _ = std::io::stdout().flush();
    }

    fn print(&mut self, event: &Event<'_>) {
        match event {
            Event::Step(report) => {
                print_line!("{report}");
                self.bar.draw(report);
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
            Event::Loaded { path, resume: true } => print_line!("resumed from {}", path.display()),
            Event::Loaded { path, .. } => print_line!("loaded the weights of {}", path.display()),
            Event::Expected { step_s } if *step_s > LONG_STEP_S => print_line!(
                "a step takes at least {} on this machine; for shorter steps, use a smaller train.global_batch, \
                 data.seq or model",
                duration(Duration::from_secs_f64(*step_s))
            ),
            Event::Expected { .. } => {}
            Event::Traced(trace) => print_line!(
                "timeline of steps {} to {}: {} (clocks aligned within {:.0} µs; open it in ui.perfetto.dev, or run \
                 `lockstep trace`)",
                trace.first,
                trace.last,
                trace.path.display(),
                1e6 * trace.clock_error
            ),
            Event::SaveFailed(_) | Event::SkippedCheckpoint { .. } | Event::Slow(_) => {
                print_warning(event);
            }
        }
    }

    /// Removes the progress bar.
    pub fn clear(&mut self) {
        self.bar.clear();
    }
}

/// Prints an event that is a problem, and nothing for others.
fn print_warning(event: &Event<'_>) {
    match event {
        Event::SaveFailed(failed) => print_error!("warning: {}", failed_line(failed)),
        Event::SkippedCheckpoint { path, rank, what } => print_error!(
            "warning: skipped {}: rank {rank}: {what}; trying an older checkpoint",
            path.display()
        ),
        Event::Slow(slow) => print_error!("warning: {slow}"),
        _ => {}
    }
}

/// A progress bar on standard error, if it is a terminal.
pub struct Bar {
    terminal: bool,
    drawn: bool,
}

impl Bar {
    pub fn new(terminal: bool) -> Bar {
        Bar { terminal, drawn: false }
    }

    pub fn draw(&mut self, report: &StepReport) {
        if !self.terminal || report.step == report.steps {
            return;
        }
        let filled = BAR_WIDTH * report.step / report.steps.max(1);
        let percent = 100 * report.step / report.steps.max(1);
        let bar = format!("{}{}", "█".repeat(filled), "░".repeat(BAR_WIDTH - filled));
        // A closed terminal is not an error.
        let _ = write!(std::io::stderr(), "{bar} {percent}%");
        self.drawn = true;
    }

    pub fn clear(&mut self) {
        if std::mem::take(&mut self.drawn) {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

fn failed_line(failed: &FailedSave) -> String {
    let FailedSave { step, rank, what, removed, retry } = failed;
    let follows = match retry {
        None => "training continues, and the previous checkpoint is kept".to_string(),
        Some(pause) => format!(
            "the training state is kept in memory, and the save is retried in {} s until it succeeds",
            pause.as_secs_f64()
        ),
    };
    let removed = match &removed[..] {
        [] => String::new(),
        steps => format!(
            "; to make room, the checkpoint of step {} was removed, which this one replaces",
            steps.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
        ),
    };
    format!("the checkpoint of step {step} was not saved: rank {rank}: {what}; {follows}{removed}")
}

fn saved_line(saved: &SavedCheckpoint) -> String {
    let (mib, seconds) = (saved.bytes as f64 / (1 << 20) as f64, saved.time.as_secs_f64());
    format!(
        "saved {} | {mib:.1} MiB in {seconds:.2} s | stalled {:.1} ms",
        saved.path.display(),
        1e3 * saved.stall.as_secs_f64()
    )
}
