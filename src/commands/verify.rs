//! `lockstep verify`: is a run the same training on every layout?

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use lockstep_comm::World;
use lockstep_kernels::Device;
use lockstep_plan::{Plan, layouts};
use lockstep_trainer::{Difference, Tolerance, Trajectory, Trial, train_on_first_ranks};

use crate::commands::predicted;
use crate::print::print_line;
use crate::run_file::RunFile;
use crate::world::{self, Engine};

/// Train a run file on one rank and on other layouts, and compare
///
/// Takes the first steps of the run on one rank, without its layout section; then the same steps from the same
/// seed on each layout, and compares every loss, every gradient norm and the weights at the end. Losses and
/// weights must agree within the tolerance; the norm is told, and counts through the weights. Numbers are
/// added up in another order on every layout, so a little is always there.
///
/// Writes no run folder. Layouts run one after the other, on ranks that are threads of this process; --engine shm
/// or tcp starts processes instead, as `lockstep train` does, and a launcher's ranks will do as well. Ends with an
/// error when a layout differs, fails or cannot be.
#[derive(clap::Args)]
pub struct Args {
    /// The run file (TOML)
    run: PathBuf,
    /// Words of the layout section, with ; between layouts: "data=2; tensor=2 sequence=true; pipe=2 schedule=zb-h1"
    /// [default: some two dozen of up to 8 ranks that the model allows, with every axis and choice in them]
    #[arg(long)]
    layouts: Option<String>,
    /// Steps of each
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// A value laid over the run file's: --set precision.compute=bf16
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// How ranks reach each other
    #[arg(long, value_enum, default_value = "threads")]
    engine: Engine,
    /// How far losses, and all weights together, may be from one rank's, relative
    /// [default: 2e-5,1e-4 in f32; 2e-2,5e-2 where anything is rounded to bf16 or f16; 2e-2,0.1 where replicas
    /// send gradients in int8, and 0.4,0.6 where they send the largest only]
    #[arg(long, value_name = "LOSS[,WEIGHTS]", value_delimiter = ',', num_args = 1)]
    tolerance: Option<Vec<f64>>,
    /// One JSON object per layout instead of a table
    #[arg(long)]
    json: bool,
}

/// What is tried when nothing is said.
const RANKS: usize = 8;
const LAYOUTS: usize = 24;

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(set) = args.sets.iter().find(|set| set.trim_start().starts_with("layout")) {
        bail!("--set {set}: layouts are what is compared; name them with --layouts");
    }
    let file = RunFile::read(&args.run, &args.sets)?;
    let tasks = Tasks::new(&args, &file)?;
    let most = tasks.layouts.iter().map(|(_, plan)| plan.ranks).max().unwrap_or(1);
    let start = world::Start { engine: args.engine, ranks: None, default_ranks: most, logs: None };
    let size = world::size(&start)?;
    if size < most {
        bail!("{size} ranks were started, and the layouts take up to {most}; start {most}");
    }
    let timeout = tasks.one.comm.timeout_s;
    let timeout = Duration::try_from_secs_f64(timeout).context("comm.timeout_s")?;
    world::run(&start, timeout, |world| rank(&tasks, &file, world))
}

/// What is to be done.
struct Tasks {
    one: Plan,
    layouts: Vec<(String, Plan)>,
    steps: u64,
    /// None: what is usual for the layout.
    tolerance: Option<Tolerance>,
    json: bool,
}

impl Tasks {
    /// Every mistake is found before a rank is started.
    fn new(args: &Args, file: &RunFile) -> anyhow::Result<Tasks> {
        let one = file.plan_with("").with_context(|| args.run.display().to_string())?;
        predicted::planned_only(&one)?;
        let listed: Vec<String> = match &args.layouts {
            Some(typed) => typed.split(';').map(|words| words.trim().to_string()).collect(),
            None => layouts(&file.config, file.source.vocab(), RANKS, LAYOUTS),
        };
        let (mut layouts, mut refused) = (Vec::new(), Vec::new());
        for words in listed.into_iter().filter(|words| !words.is_empty()) {
            match file.plan_with(&words) {
                Ok(plan) => layouts.push((words, plan)),
                Err(why) => refused.push(format!("{words}: {why}").replace('\n', "\n  ")),
            }
        }
        if !refused.is_empty() {
            bail!("layouts that cannot be:\n  {}", refused.join("\n  "));
        }
        if layouts.is_empty() && args.layouts.is_some() {
            bail!("--layouts names none; write it as --layouts \"data=2; tensor=2 sequence=true\"");
        }
        if layouts.is_empty() {
            bail!("this run cannot be cut on up to {RANKS} ranks: there is no layout to compare");
        }
        let tolerance = match args.tolerance.as_deref() {
            None => None,
            Some([both]) => Some(Tolerance { loss: *both, weights: *both }),
            Some([loss, weights]) => Some(Tolerance { loss: *loss, weights: *weights }),
            Some(_) => bail!("--tolerance: one number for losses, and one for weights"),
        };
        Ok(Tasks { one, layouts, steps: args.steps, tolerance, json: args.json })
    }

    /// How far a layout may be from one rank.
    fn tolerance(&self, plan: &Plan) -> Tolerance {
        self.tolerance.unwrap_or_else(|| Tolerance::of(plan, self.steps))
    }
}

/// What every rank does: its part of each layout that has a place for it. The first rank compares.
fn rank(tasks: &Tasks, file: &RunFile, world: &World) -> anyhow::Result<()> {
    let Tasks { one, layouts, steps, .. } = tasks;
    let screen = Screen::new(tasks, world.rank() == 0);
    let trained = |number: usize, words: &str, plan: &Plan| {
        let mut told = |step| screen.draw(number, words, step);
        let device = || Device::cpu(plan.train.threads);
        let trial = Trial { plan, source: &file.source, steps: *steps, device: &device };
        let trajectory = train_on_first_ranks(trial, world, &mut told);
        screen.clear();
        trajectory.with_context(|| format!("on {words}"))
    };
    let reference = trained(0, "one rank", one)?;
    if reference.is_some() {
        heading(tasks);
    }
    let mut differ = 0;
    for (number, (words, plan)) in layouts.iter().enumerate() {
        let trajectory: Option<Trajectory> = trained(number + 1, words, plan)?;
        if let (Some(one), Some(trajectory)) = (&reference, &trajectory) {
            let tolerance = tasks.tolerance(plan);
            let difference = one.difference(trajectory, &tolerance);
            differ += usize::from(!difference.within(&tolerance));
            row(tasks, words, plan, &difference);
        }
    }
    // Ranks leave together: nobody takes the end of another for a failure.
    world.barrier()?;
    if differ > 0 {
        bail!(
            "{differ} of {} layouts differ from one rank by more than the tolerance",
            layouts.len()
        );
    }
    if world.rank() == 0 && !tasks.json {
        let count = layouts.len();
        match lossy(tasks) {
            None => print_line!("{count} of {count} layouts are the same training"),
            Some(_) => print_line!("{count} of {count} layouts are within their tolerance"),
        }
    }
    Ok(())
}

fn heading(tasks: &Tasks) {
    if tasks.json {
        return;
    }
    let Tasks { one, steps, .. } = tasks;
    let tolerance = tasks.tolerance(one);
    print_line!(
        "{}: {:?}, {:.2}M parameters, {:?}; {steps} steps on one rank and on each layout: \
         losses within {:e}, weights within {:e}",
        one.name,
        one.model.family,
        one.model.param_count() as f64 / 1e6,
        one.precision.compute,
        tolerance.loss,
        tolerance.weights,
    );
    if let Some(looser) = lossy(tasks) {
        print_line!(
            "replicas send their gradients as {}, which loses or delays some of them: there, losses within {:e}, \
             weights within {:e}",
            one.comm.compression,
            looser.loss,
            looser.weights,
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

/// The tolerance of replicas that compress their gradients, where that is another than one rank's: it sums with nobody.
fn lossy(tasks: &Tasks) -> Option<Tolerance> {
    let one = tasks.tolerance(&tasks.one);
    let of_layouts = tasks.layouts.iter().map(|(_, plan)| tasks.tolerance(plan));
    of_layouts.into_iter().find(|looser| *looser != one)
}

/// Of the longest layout.
fn width(tasks: &Tasks) -> usize {
    tasks.layouts.iter().map(|(words, _)| words.len()).fold("layout".len(), usize::max)
}

/// A layout's result, as programs read it. The errors are relative, and null where there is no number.
#[derive(serde::Serialize)]
struct Record<'a> {
    layout: &'a str,
    ranks: usize,
    loss_rel_err: f64,
    norm_rel_err: f64,
    weight_rel_err: f64,
    ok: bool,
    /// The first in the order of the forward pass that is too far away, when the whole is.
    tensor: Option<&'a str>,
}

fn row(tasks: &Tasks, layout: &str, plan: &Plan, difference: &Difference) {
    let Difference { loss, grad_norm, weights, .. } = *difference;
    let (ranks, ok) = (plan.ranks, difference.within(&tasks.tolerance(plan)));
    // Some tensors are noise on any layout, as are biases of keys, whose true gradient is zero.
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
    let what = match (ok, tensor) {
        (true, _) => "yes".into(),
        (false, Some((name, far))) => format!("NO: {name} is {far:.1e} away"),
        (false, None) => "NO".to_string(),
    };
    print_line!(
        "{layout:<width$} {ranks:>5} {loss:>9.1e} {grad_norm:>9.1e} {weights:>9.1e}  {what}"
    );
}

/// The first rank's line on a terminal while a layout is at work.
struct Screen {
    watched: bool,
    layouts: usize,
    steps: u64,
}

impl Screen {
    fn new(tasks: &Tasks, first: bool) -> Screen {
        let watched = first && world::on_terminal();
        Screen { watched, layouts: tasks.layouts.len(), steps: tasks.steps }
    }

    fn draw(&self, number: usize, words: &str, step: u64) {
        if self.watched {
            let Screen { layouts, steps, .. } = self;
            // A terminal that went away is no reason to fail.
            let _ = write!(
                std::io::stderr(),
                "\r\x1b[K{number}/{layouts} {words}: step {step}/{steps}"
            );
        }
    }

    fn clear(&self) {
        if self.watched {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
