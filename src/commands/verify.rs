//! `lockstep verify`: checks that a run gives the same result on every layout.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use lockstep_comm::World;
use lockstep_events::duration;
use lockstep_plan::{Plan, layouts};
use lockstep_trainer::{Difference, Tolerance, Trajectory, Trial, train_on_first_ranks};

use crate::commands::progress::Quiet;
use crate::commands::{device, prediction};
use crate::print::print_line;
use crate::run_file::RunFile;
use crate::world::{self, Engine};

/// Check that a run gives the same result on every layout
///
/// Trains the first steps of the run on one rank (ignoring its layout section), then the same steps with the same seed
/// on each layout, and compares losses, gradient norms and final weights. Losses and weights must agree within the
/// tolerance; gradient norms are only shown. Small differences are normal, because each layout sums in a different
/// order.
///
/// Layouts run one after the other. By default, ranks are threads of this process; --engine shm or tcp starts
/// processes, and ranks started by a launcher work as well. No run folder is written. Exits with an error if a layout
/// differs, fails or is invalid.
#[derive(clap::Args)]
pub struct Args {
    /// Run file (TOML)
    run: PathBuf,
    /// Layouts to check, separated by semicolons, e.g. "data=2; tensor=2 sequence=true; pipe=2 schedule=zb-h1;
    /// data=2 pipe=2 placement=pipe,data,context,tensor"
    /// [default: up to 24 valid layouts of up to 8 ranks that cover every axis and option]
    #[arg(long)]
    layouts: Option<String>,
    /// Number of steps on each layout
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Override a key of the run file, e.g. --set precision.compute=bf16
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// How ranks run and communicate
    #[arg(long, value_enum, default_value = "threads")]
    engine: Engine,
    /// Maximum relative difference of losses and weights from one rank
    /// [default: 2e-5,1e-4 in f32; 2e-2,5e-2 with bf16 or f16; 2e-2,0.1 with int8 gradients; 0.4,0.6 with top-k
    /// gradients]
    #[arg(long, value_name = "LOSS[,WEIGHTS]", value_delimiter = ',', num_args = 1)]
    tolerance: Option<Vec<f64>>,
    /// Print one JSON object per layout instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    quiet: Quiet,
}

/// Limits of the default layouts.
const MAX_RANKS: usize = 8;
const MAX_LAYOUTS: usize = 24;

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(set) = args.sets.iter().find(|set| set.trim_start().starts_with("layout")) {
        bail!("--set {set}: the run file's layout is ignored; choose layouts with --layouts");
    }
    let file = RunFile::read(&args.run, &args.sets)?;
    let tasks = Tasks::new(&args, &file)?;
    let max_ranks = tasks.layouts.iter().map(|(_, plan)| plan.ranks).max().unwrap_or(1);
    let start =
        world::Start { engine: args.engine, ranks: None, default_ranks: max_ranks, logs: None };
    let size = world::size(&start)?;
    if size < max_ranks {
        bail!(
            "{size} ranks were started, but the layouts need {max_ranks}; start {max_ranks} ranks"
        );
    }
    let timeout = tasks.one.comm.timeout_s;
    let timeout = Duration::try_from_secs_f64(timeout).context("comm.timeout_s")?;
    world::run(&start, timeout, |world| rank(&tasks, &file, world))
}

/// The layouts to compare, and how.
struct Tasks {
    /// Plan of the reference on one rank.
    one: Plan,
    layouts: Vec<(String, Plan)>,
    steps: u64,
    /// Default: depends on the layout.
    tolerance: Option<Tolerance>,
    json: bool,
    quiet: bool,
}

impl Tasks {
    /// Resolves all plans, so that errors are reported before any rank starts.
    fn new(args: &Args, file: &RunFile) -> anyhow::Result<Tasks> {
        let one = file.plan_with_layout("").with_context(|| args.run.display().to_string())?;
        prediction::check_trainable(&one)?;
        let names: Vec<String> = match &args.layouts {
            Some(list) => list.split(';').map(|name| name.trim().to_string()).collect(),
            None => layouts(&file.config, file.source.vocab(), MAX_RANKS, MAX_LAYOUTS),
        };
        let (mut layouts, mut invalid) = (Vec::new(), Vec::new());
        for name in names.into_iter().filter(|name| !name.is_empty()) {
            match file.plan_with_layout(&name) {
                Ok(plan) => layouts.push((name, plan)),
                Err(why) => invalid.push(format!("{name}: {why}").replace('\n', "\n  ")),
            }
        }
        if !invalid.is_empty() {
            bail!("invalid layouts:\n  {}", invalid.join("\n  "));
        }
        if layouts.is_empty() && args.layouts.is_some() {
            bail!(
                "--layouts is empty; list layouts as in --layouts \"data=2; tensor=2 sequence=true\""
            );
        }
        if layouts.is_empty() {
            bail!(
                "no layout of 2 to {MAX_RANKS} ranks is valid for this run, so there is nothing to compare"
            );
        }
        let tolerance = match args.tolerance.as_deref() {
            None => None,
            Some([both]) => Some(Tolerance { loss: *both, weights: *both }),
            Some([loss, weights]) => Some(Tolerance { loss: *loss, weights: *weights }),
            Some(_) => bail!("--tolerance takes one or two numbers: LOSS[,WEIGHTS]"),
        };
        let Args { steps, json, quiet: Quiet { quiet }, .. } = *args;
        Ok(Tasks { one, layouts, steps, tolerance, json, quiet })
    }

    fn tolerance(&self, plan: &Plan) -> Tolerance {
        self.tolerance.unwrap_or_else(|| Tolerance::of(plan, self.steps))
    }
}

/// Trains all layouts that use this rank. Rank 0 compares the results.
fn rank(tasks: &Tasks, file: &RunFile, world: &World) -> anyhow::Result<()> {
    let Tasks { one, layouts, steps, .. } = tasks;
    let progress = ProgressLine::new(tasks, world.rank() == 0);
    let train = |number: usize, name: &str, plan: &Plan| {
        let mut on_step = |step| progress.draw(number, name, step);
        let device = device::open(plan, world)?;
        let device = || device.clone();
        let trial = Trial { plan, source: &file.source, steps: *steps, device: &device };
        let trajectory = train_on_first_ranks(trial, world, &mut on_step);
        progress.clear();
        trajectory.with_context(|| format!("on {name}"))
    };
    let reference = train(0, "one rank", one)?;
    if reference.is_some() {
        print_header(tasks);
    }
    let mut differ = 0;
    for (number, (name, plan)) in layouts.iter().enumerate() {
        let trajectory: Option<Trajectory> = train(number + 1, name, plan)?;
        if let (Some(one), Some(trajectory)) = (&reference, &trajectory) {
            let tolerance = tasks.tolerance(plan);
            let difference = one.difference(trajectory, &tolerance);
            differ += usize::from(!difference.within(&tolerance));
            print_row(tasks, name, plan, &difference);
        }
    }
    // A rank that exits before the others would look like a failure to them.
    world.barrier()?;
    if differ > 0 {
        bail!(
            "{differ} of {} layouts differ from one rank by more than the tolerance",
            layouts.len()
        );
    }
    if world.rank() == 0 && !tasks.json {
        let count = layouts.len();
        match lossy_tolerance(tasks) {
            None => print_line!("{count} of {count} layouts agree with one rank"),
            Some(_) => print_line!("{count} of {count} layouts agree within their tolerances"),
        }
    }
    Ok(())
}

fn print_header(tasks: &Tasks) {
    if tasks.json {
        return;
    }
    let Tasks { one, steps, .. } = tasks;
    let tolerance = tasks.tolerance(one);
    print_line!(
        "{}: {}, {:.2}M parameters, {}; {steps} steps on one rank and on each layout: \
         losses within {:e}, weights within {:e}",
        one.name,
        one.model.family.name(),
        one.model.param_count() as f64 / 1e6,
        one.precision.compute,
        tolerance.loss,
        tolerance.weights,
    );
    if let Some(lossy) = lossy_tolerance(tasks) {
        print_line!(
            "with {} gradient compression: losses within {:e}, weights within {:e}",
            one.comm.compression,
            lossy.loss,
            lossy.weights,
        );
    }
    let width = width(tasks);
    print_line!(
        "{:<width$} {:>5} {:>9} {:>9} {:>9}  ok",
        "layout",
        "ranks",
        "loss",
        "norm",
        "weights"
    );
}

/// The tolerance of layouts that compress gradients. One rank reduces nothing and compresses nothing.
fn lossy_tolerance(tasks: &Tasks) -> Option<Tolerance> {
    let one = tasks.tolerance(&tasks.one);
    let mut tolerances = tasks.layouts.iter().map(|(_, plan)| tasks.tolerance(plan));
    tolerances.find(|tolerance| *tolerance != one)
}

/// Width of the layout column.
fn width(tasks: &Tasks) -> usize {
    tasks.layouts.iter().map(|(name, _)| name.len()).fold("layout".len(), usize::max)
}

/// JSON record of one layout. Errors are relative; an error that is not finite is null.
#[derive(serde::Serialize)]
struct Record<'a> {
    layout: &'a str,
    ranks: usize,
    loss_rel_err: f64,
    norm_rel_err: f64,
    weight_rel_err: f64,
    ok: bool,
    /// If the layout differs: the first tensor that does, in the order of the forward pass.
    tensor: Option<&'a str>,
}

fn print_row(tasks: &Tasks, layout: &str, plan: &Plan, difference: &Difference) {
    let Difference { loss, grad_norm, weights, .. } = *difference;
    let (ranks, ok) = (plan.ranks, difference.within(&tasks.tolerance(plan)));
    // Some tensors are noise on every layout, e.g. the biases of keys, whose true gradient is zero.
    let tensor = difference.tensor.as_ref().filter(|_| !ok);
    if tasks.json {
        let record = Record {
            layout,
            ranks,
            loss_rel_err: loss,
            norm_rel_err: grad_norm,
            weight_rel_err: weights,
            ok,
            tensor: tensor.map(|(name, _)| name.as_str()),
        };
        print_line!("{}", serde_json::to_string(&record).expect("a record is plain data"));
        return;
    }
    let width = width(tasks);
    let verdict = match (ok, tensor) {
        (true, _) => "yes".into(),
        (false, Some((name, error))) => format!("NO: {name} differs by {error:.1e}"),
        (false, None) => "NO".to_string(),
    };
    print_line!(
        "{layout:<width$} {ranks:>5} {loss:>9.1e} {grad_norm:>9.1e} {weights:>9.1e}  {verdict}"
    );
}

/// Progress of the current layout, shown by rank 0 on a terminal.
struct ProgressLine {
    visible: bool,
    layouts: usize,
    steps: u64,
    start: Instant,
}

impl ProgressLine {
    fn new(tasks: &Tasks, first: bool) -> ProgressLine {
        let visible = first && !tasks.quiet && world::on_terminal();
        let (layouts, steps) = (tasks.layouts.len(), tasks.steps);
        ProgressLine { visible, layouts, steps, start: Instant::now() }
    }

    fn draw(&self, number: usize, name: &str, step: u64) {
        if self.visible {
            let ProgressLine { layouts, steps, .. } = self;
            let pace = self.pace(number as u64 * steps + step, self.start.elapsed());
            // A closed terminal is not an error.
            let _ = write!(
                std::io::stderr(),
                "\r\x1b[K{number}/{layouts} {name}: step {step}/{steps}{pace}"
            );
        }
    }

    /// Rate and time left, if layouts are equally fast.
    fn pace(&self, done: u64, elapsed: Duration) -> String {
        if done == 0 {
            return String::new();
        }
        let rate = done as f64 / elapsed.as_secs_f64().max(1e-9);
        let left = (self.layouts as u64 + 1) * self.steps - done;
        let eta = duration(Duration::from_secs_f64((left as f64 / rate).min(1e9)));
        format!(", {rate:.1} steps/s, eta {eta}")
    }

    fn clear(&self) {
        if self.visible {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_has_rate_and_time_left() {
        let line = ProgressLine { visible: true, layouts: 3, steps: 20, start: Instant::now() };
        assert_eq!(line.pace(0, Duration::from_secs(1)), "");
        assert_eq!(line.pace(20, Duration::from_secs(10)), ", 2.0 steps/s, eta 30s");
    }
}
