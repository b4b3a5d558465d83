//! `lockstep train`: a run file becomes a trained model.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use lockstep_comm::World;
use lockstep_events::StepReport;
use lockstep_kernels::Tag;
use lockstep_model::{Model, Sampling};
use lockstep_plan::{Ledger, Plan};
use lockstep_trainer::{self as trainer, Event, Rank, Run, Wanted, Whole, dtype, load_whole};

use crate::commands::foretold::{self, Foretold, Measured};
use crate::run_file::{RunFile, fresh_folder};
use crate::say::{say, say_part};
use crate::world::{self, Engine};

/// Train a model as a run file describes it
///
/// Starts its own ranks on this machine, or joins those that a launcher started. Everything goes into
/// RUNS/NAME: plan.json, metrics.jsonl, tensorboard/, logs/, checkpoints/. A run of that name that is already
/// there is kept as NAME.1, NAME.2, …
#[derive(clap::Args)]
pub struct Args {
    /// The run file (TOML)
    run: PathBuf,
    /// Ranks to start [default: what the run file's layout asks for]
    #[arg(long)]
    ranks: Option<usize>,
    /// A value laid over the run file's: --set train.lr=1e-3
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// How ranks reach each other
    #[arg(long, value_enum, default_value = "shm")]
    engine: Engine,
    /// Start from the weights of this checkpoint or run (see `lockstep import`)
    #[arg(long, value_name = "RUN|CHECKPOINT", conflicts_with = "resume")]
    from: Option<PathBuf>,
    /// Go on with the run of this name from its newest checkpoint
    #[arg(long)]
    resume: bool,
    /// Where runs lie
    #[arg(long, default_value = "runs")]
    runs: PathBuf,
    /// What `bench machine` wrote, to foretell the step time with [default: RUNS/machine.toml, where it is]
    #[arg(long, value_name = "FILE")]
    cluster: Option<String>,
    /// Only read the run file, print the plan as JSON and stop
    #[arg(long)]
    dry_run: bool,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let file = RunFile::read(&args.run, &args.sets)?;
    let mut start = world::Start {
        engine: args.engine,
        ranks: args.ranks,
        default_ranks: file.config.ranks(),
        logs: None,
    };
    // Every mistake is found before a rank is started.
    let size = world::size(&start)?;
    let plan = file.plan(size, size)?;
    if args.dry_run {
        say!("{}", serde_json::to_string_pretty(&plan)?);
        return Ok(ExitCode::SUCCESS);
    }
    if world::starts_all(&start)? {
        foretold::refuse(&plan)?;
    }
    if world::is_parent(&start)? {
        let folder = prepare(&args, &plan)?;
        start.logs = Some(folder.join("logs"));
    }
    let timeout = Duration::try_from_secs_f64(plan.comm.timeout_s).context("comm.timeout_s")?;
    world::run(&start, timeout, |world| {
        let plan = file.plan(world.size(), world::local_ranks(world))?;
        rank(&args, &file, &plan, world)
    })
}

/// The run's folder, made by whoever comes first: the parent of our own ranks, or rank 0.
fn prepare(args: &Args, plan: &Plan) -> anyhow::Result<PathBuf> {
    if args.resume {
        let folder = args.runs.join(&plan.name);
        lockstep_ckpt::find(&folder)?;
        return Ok(folder);
    }
    if let Some(from) = args.from.as_ref().filter(|from| lies_in(from, &args.runs.join(&plan.name)))
    {
        let from = from.display();
        bail!("--from {from} lies where this run will; give it another name with --set name=NAME");
    }
    let (folder, moved) = fresh_folder(&args.runs, &plan.name)?;
    if let Some(moved) = moved {
        eprintln!("the run that was here before is now {}", moved.display());
    }
    Ok(folder)
}

/// Whether moving a folder aside would move this too.
fn lies_in(path: &Path, folder: &Path) -> bool {
    match (path.canonicalize(), folder.canonicalize()) {
        (Ok(path), Ok(folder)) => path.starts_with(folder),
        // One of them is not there.
        _ => false,
    }
}

fn rank(args: &Args, file: &RunFile, plan: &Plan, world: &World) -> anyhow::Result<()> {
    let first = world.rank() == 0;
    let folder = args.runs.join(&plan.name);
    let foretold = Foretold::of(plan, args.cluster.as_deref(), &args.runs)?;
    if first {
        prepare(args, plan)?;
        let path = folder.join("plan.json");
        std::fs::write(&path, serde_json::to_string_pretty(plan)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        introduce(plan, file);
        foretold.introduce(plan);
    }
    let start = match (&args.from, args.resume) {
        (Some(from), _) => {
            Some(trainer::Start { checkpoint: lockstep_ckpt::find(from)?, resume: false })
        }
        (None, true) => {
            Some(trainer::Start { checkpoint: lockstep_ckpt::find(&folder)?, resume: true })
        }
        (None, false) => None,
    };
    world.barrier()?;

    let floor = file.source.entropy(plan.data.seq);
    let mut screen = Screen {
        terminal: world::on_terminal(),
        floor,
        drawn: false,
        measured: Measured::default(),
    };
    let run = Run { plan, group: world, source: &file.source, folder: &folder, start };
    let trained = trainer::run(&run, &mut |event| screen.show(&event));
    screen.clear();
    let trained = trained?;
    // Text is made by rank 0, which is given all parameters for it.
    let params = if plan.train.sample.is_some() { trained.params()? } else { None };
    let compare = || foretold.compare(plan, &screen.measured);
    trainer::alone(world, || conclude(&trained, params, file, &folder, compare))?;
    // Ranks leave together: nobody takes the end of another for a failure.
    world.barrier()?;
    Ok(())
}

fn introduce(plan: &Plan, file: &RunFile) {
    let (model, train) = (&plan.model, &plan.train);
    say!(
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
    if let Some(floor) = file.source.entropy(plan.data.seq) {
        say!(
            "the true entropy of this data is {floor:.4} nats per token: no model's loss stays below it"
        );
    }
}

/// Rank 0's words, and its bar when somebody watches.
struct Screen {
    terminal: bool,
    floor: Option<f64>,
    drawn: bool,
    measured: Measured,
}

const BAR: usize = 24;

impl Screen {
    fn show(&mut self, event: &Event<'_>) {
        self.clear();
        match event {
            Event::Step(report) => {
                self.measured.take(report);
                say!("{report}");
                self.draw(report);
            }
            Event::Evaluated(report) => {
                let above = match (self.floor, report.eval_loss) {
                    (Some(floor), Some(loss)) => {
                        format!(" | {:.1}% above the entropy", 100.0 * (loss / floor - 1.0))
                    }
                    _ => String::new(),
                };
                say!("{report}{above}");
            }
            Event::Saved(path) => say!("saved {}", path.display()),
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

    fn clear(&mut self) {
        if std::mem::take(&mut self.drawn) {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

/// Memory as it was planned and as it came, and some text.
fn conclude(
    rank: &Rank<'_>,
    params: Option<Whole>,
    file: &RunFile,
    folder: &Path,
    compare: impl Fn(),
) -> anyhow::Result<()> {
    let plan = rank.plan;
    let planned = Ledger::of(plan, rank.group.rank());
    let memory = rank.device.memory();
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    say!("memory per rank, planned and measured at its peak:");
    for (tag, planned) in [
        (Tag::Parameters, planned.parameters),
        (Tag::Gradients, planned.gradients),
        (Tag::Optimizer, planned.optimizer),
        (Tag::Activations, planned.activations),
    ] {
        say!("  {:<12} {:>9.2} {:>9.2} MiB", tag.name(), mib(planned), mib(memory.of(tag).peak));
    }
    compare();
    if let (Some(wanted), Some(params)) = (&plan.train.sample, params) {
        say_part!("\n{}", wanted.prompt);
        let sampling = Sampling { temperature: 0.8, top_k: None, top_p: Some(0.95) };
        let wanted = Wanted {
            prompt: &wanted.prompt,
            tokens: wanted.tokens,
            sampling,
            seed: plan.train.seed,
        };
        let (device, model, dtype) = (&rank.device, Model::whole(&plan.model), dtype(plan));
        let weights = load_whole(device, &plan.model, dtype, &params);
        drop(params);
        trainer::generate(device, &model, &weights, dtype, &file.source, &wanted, |text| {
            say_part!("{text}")
        })?;
        say!("\n");
    }
    say!("everything is in {}", folder.display());
    Ok(())
}
