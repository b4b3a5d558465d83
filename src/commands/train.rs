//! `lockstep train`: a run file becomes a trained model.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use lockstep_comm::World;
use lockstep_kernels::Device;
use lockstep_kernels::Tag;
use lockstep_launch::{EXIT_PERMANENT, EXIT_STOPPED};
use lockstep_model::{Model, Sampling};
use lockstep_plan::{Ledger, Plan};
use lockstep_trainer::{self as trainer, HostTensors, Prompt, Rank, Run, dtype, load_whole};

use crate::commands::predicted::{self, Predicted};
use crate::commands::replay;
use crate::commands::screen::{self, Screen};
use crate::print::{print_error, print_line, print_part};
use crate::run_file::{RunFile, fresh_folder};
use crate::supervise::{self, Supervision};
use crate::world::{self, Engine};
use crate::{consistency, stop};

/// Train a model as a run file describes it
///
/// Starts its own ranks on this machine, or joins those that a launcher started. Everything goes into
/// RUNS/NAME: plan.json, metrics.jsonl, tensorboard/, logs/, checkpoints/. A run of that name that is already
/// there is kept as NAME.1, NAME.2, …
///
/// When a rank fails, all are started anew from the newest checkpoint. SIGTERM and SIGINT have them save and stop.
///
/// Ends with 0 when the training is done; 75 when it was asked to stop and has saved (the same command with
/// --resume=if-any goes on); 128 + the signal when there was no time to save; another code when it failed.
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
    /// Go on with the run of this name from its newest checkpoint; with =if-any, or begin if there is none
    #[arg(long, value_enum, value_name = "WHEN", num_args = 0..=1, require_equals = true, default_missing_value = "always")]
    resume: Option<Resume>,
    /// Where runs lie
    #[arg(long, default_value = "runs")]
    runs: PathBuf,
    /// Do step N of the run of this name once more, twice, from the state before it, and tell whether data or a
    /// machine made it what it was; writes nothing
    #[arg(long, value_name = "N", conflicts_with = "resume")]
    replay_step: Option<u64>,
    /// What `bench machine` wrote, to predict the step time with [default: RUNS/machine.toml, where it is]
    #[arg(long, value_name = "FILE")]
    cluster: Option<String>,
    /// Only read the run file, print the plan as JSON and stop
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    supervision: Supervision,
}

impl Args {
    /// What was typed, as far as it says which run this is.
    fn words(&self) -> Vec<String> {
        let path = |path: &Path| path.display().to_string();
        let mut words = vec![path(&self.run)];
        let mut add = |flag: &str, value: String| words.extend([flag.to_string(), value]);
        if let Some(ranks) = self.ranks {
            add("--ranks", ranks.to_string());
        }
        self.sets.iter().for_each(|set| add("--set", set.clone()));
        if self.engine != Engine::Shm {
            add("--engine", self.engine.name().to_string());
        }
        if let Some(from) = &self.from {
            add("--from", path(from));
        }
        if self.runs != Path::new("runs") {
            add("--runs", path(&self.runs));
        }
        words
    }
}

/// What there must be to go on with.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Resume {
    /// A checkpoint
    Always,
    /// Whatever there is; so that the same command can be given again and again
    IfAny,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let file = RunFile::read(&args.run, &args.sets)?;
    let mut start = world::Start {
        engine: args.engine,
        ranks: args.ranks,
        default_ranks: args.supervision.max_ranks.unwrap_or(file.config.ranks()),
        logs: None,
    };
    let parent = world::is_parent(&start, args.supervision.nnodes.is_some())?;
    if !parent && args.supervision.elastic() {
        // As many as the launcher found.
        start.ranks = None;
    }
    // Every mistake is found before a rank is started.
    let size = match (world::size(&start)?, parent) {
        // A batch system's tasks are counted otherwise.
        (_, true) => args.ranks.unwrap_or(start.default_ranks),
        (size, false) => size,
    };
    let plan = plan(&args, &file, size, size)?;
    if args.dry_run {
        print_line!("{}", serde_json::to_string_pretty(&plan)?);
        return Ok(ExitCode::SUCCESS);
    }
    predicted::planned_only(&plan)?;
    if world::starts_all(&start)? {
        predicted::refuse(&plan)?;
    }
    // To look at a step once more needs no supervision, and leaves the folder alone.
    if parent && args.replay_step.is_none() {
        let folder = match args.supervision.is_first() {
            true => prepare(&args, &plan, false)?,
            false => args.runs.join(&plan.name),
        };
        return supervise::run(&args.supervision, &file, size, &folder);
    }
    if args.replay_step.is_none() {
        stop::install_handlers();
    }
    let timeout = Duration::try_from_secs_f64(plan.comm.timeout_s).context("comm.timeout_s")?;
    let stopped = AtomicBool::new(false);
    let ended = world::run(&start, timeout, |world| {
        let plan = plan_of_rank(&args, &file, world)?;
        stopped.fetch_or(rank(&args, &file, &plan, world)?, Ordering::Relaxed);
        Ok(())
    });
    match ended {
        Ok(_) if stopped.into_inner() => Ok(ExitCode::from(EXIT_STOPPED as u8)),
        Err(error) if world::is_launched() && is_hopeless(&error) => {
            print_error!("error: {error:#}");
            Ok(ExitCode::from(EXIT_PERMANENT as u8))
        }
        ended => ended,
    }
}

fn plan(args: &Args, file: &RunFile, ranks: usize, local: usize) -> anyhow::Result<Plan> {
    match args.supervision.elastic() {
        true => file.plan_within(ranks, local),
        false => file.plan(ranks, local),
    }
}

fn plan_of_rank(args: &Args, file: &RunFile, world: &World) -> anyhow::Result<Plan> {
    let plan = plan(args, file, world.size(), world::local_ranks(world))?;
    if plan.ranks != world.size() {
        bail!("{} of {} ranks can work; start that many", plan.ranks, world.size());
    }
    Ok(plan)
}

/// Whether another try would fail in the same way: what is wrong is what the ranks were told, or what they computed.
/// Anything else may be a machine's.
fn is_hopeless(error: &anyhow::Error) -> bool {
    use trainer::Error::{Checkpoint, Comm, Folder, OtherRank};
    let machine = |error: &trainer::Error| {
        matches!(error, Comm(_) | Checkpoint(_) | Folder { .. } | OtherRank { .. })
    };
    match error.downcast_ref::<trainer::Error>() {
        Some(Checkpoint(lockstep_ckpt::Error::Fenced { .. })) => true,
        Some(error) => !machine(error),
        None => !error
            .chain()
            .any(|cause| cause.is::<lockstep_comm::Error>() || cause.is::<std::io::Error>()),
    }
}

/// The run's folder, made by whoever comes first: the parent of our own ranks, or rank 0. `begun` says that this run
/// has begun before, and goes on.
fn prepare(args: &Args, plan: &Plan, begun: bool) -> anyhow::Result<PathBuf> {
    if begun || args.resume.is_some() {
        let folder = args.runs.join(&plan.name);
        if args.resume == Some(Resume::Always) {
            lockstep_ckpt::find(&folder)?;
        }
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        return Ok(folder);
    }
    if let Some(from) = args.from.as_ref().filter(|from| lies_in(from, &args.runs.join(&plan.name)))
    {
        let from = from.display();
        bail!("--from {from} lies where this run will; give it another name with --set name=NAME");
    }
    let (folder, moved) = fresh_folder(&args.runs, &plan.name)?;
    if let Some(moved) = moved {
        // Whatever may be left of the ranks that trained there has no place in the new run.
        lockstep_ckpt::claim(&folder, lockstep_ckpt::newest(&moved)?)?;
        print_error!("the run that was here before is now {}", moved.display());
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

/// Trains as one of the ranks: whether it was stopped before the end.
fn rank(args: &Args, file: &RunFile, plan: &Plan, world: &World) -> anyhow::Result<bool> {
    let first = world.rank() == 0;
    consistency::check(world, plan, file)?;
    let folder = args.runs.join(&plan.name);
    if let Some(step) = args.replay_step {
        let from = args.from.as_ref().map(|from| lockstep_ckpt::find(from)).transpose()?;
        let from = from.map(|checkpoint| trainer::Start { checkpoint, resume: false });
        replay::rank(plan, &file.source, &folder, from, step, world)?;
        return Ok(false);
    }
    // Ranks that are not of the first generation go on with what those before them have begun.
    let begun = supervise::is_supervised() || world::generation() > 0;
    let floor = file.source.entropy(plan.data.seq);
    let predicted = Predicted::of(plan, args.cluster.as_deref(), &args.runs)?;
    if first {
        prepare(args, plan, begun)?;
        let path = folder.join("plan.json");
        std::fs::write(&path, serde_json::to_string_pretty(plan)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        screen::introduce(plan, floor);
        predicted.introduce(plan);
    }
    let start = start(args, world, &folder, begun)?;
    let mut screen = Screen::new(world::on_terminal(), floor);
    let source = &file.source;
    let generation = supervise::is_supervised().then(|| u64::from(world::generation()));
    let device = Device::cpu(plan.train.threads);
    let stop = &stop::requested;
    let run = Run { plan, device, group: world, source, folder: &folder, start, generation, stop };
    let finished = trainer::run(&run, &mut |event| screen.show(&event));
    screen.clear();
    let trainer::Finished { rank: trained, stopped } =
        finished.map_err(|error| explained(args, error))?;
    if let Some(step) = stopped {
        if first {
            print_line!(
                "stopped after step {step} of {}, as asked; --resume goes on",
                plan.train.steps
            );
        }
        // Nobody takes the end of another for a failure.
        world.barrier()?;
        return Ok(true);
    }
    // Text is made by rank 0, which is given all parameters for it.
    let params = if plan.train.sample.is_some() { trained.params()? } else { None };
    let compare = || predicted.compare(plan, &screen.measured);
    trainer::on_rank_zero(world, || conclude(&trained, params, file, &folder, compare))?;
    // Ranks leave together: nobody takes the end of another for a failure.
    world.barrier()?;
    Ok(false)
}

/// Where to begin: rank 0 looks whether there is something to go on with, for all of them.
fn start(
    args: &Args,
    world: &World,
    folder: &Path,
    begun: bool,
) -> anyhow::Result<Option<trainer::Start>> {
    let goes_on = match (begun, args.resume) {
        (false, None) => false,
        (false, Some(Resume::Always)) => true,
        _ => !lockstep_ckpt::steps(folder).is_empty(),
    };
    let mut goes_on = [i64::from(goes_on)];
    world.broadcast(&mut goes_on, 0)?;
    let (checkpoint, resume) = match (goes_on[0] > 0, &args.from) {
        (true, _) => (folder.to_path_buf(), true),
        (false, Some(from)) => (from.clone(), false),
        (false, None) => return Ok(None),
    };
    Ok(Some(trainer::Start { checkpoint, resume }))
}

/// An error with what to type next.
fn explained(args: &Args, error: trainer::Error) -> anyhow::Error {
    match error {
        trainer::Error::NotFinite { step, .. } => {
            let told = error.to_string();
            anyhow::anyhow!(
                "{told}. To tell whether the data or a machine is to blame:\n  {}",
                replay::command(&args.words(), step)
            )
        }
        error => error.into(),
    }
}

/// Memory as it was planned and as it came, and some text.
fn conclude(
    rank: &Rank<'_>,
    params: Option<HostTensors>,
    file: &RunFile,
    folder: &Path,
    compare: impl Fn(),
) -> anyhow::Result<()> {
    let plan = rank.plan;
    let planned = Ledger::of(plan, rank.group.rank());
    let memory = rank.device.memory();
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    print_line!("memory per rank, planned and measured at its peak:");
    for (tag, planned) in [
        (Tag::Parameters, planned.parameters),
        (Tag::Gradients, planned.gradients),
        (Tag::Optimizer, planned.optimizer),
        (Tag::Activations, planned.activations),
    ] {
        print_line!(
            "  {:<12} {:>9.2} {:>9.2} MiB",
            tag.name(),
            mib(planned),
            mib(memory.of(tag).peak)
        );
    }
    compare();
    if let (Some(wanted), Some(params)) = (&plan.train.sample, params) {
        print_part!("\n{}", wanted.prompt);
        let sampling = Sampling { temperature: 0.8, top_k: None, top_p: Some(0.95) };
        let wanted = Prompt {
            prompt: &wanted.prompt,
            tokens: wanted.tokens,
            sampling,
            seed: plan.train.seed,
        };
        let (device, model, dtype) = (&rank.device, Model::whole(&plan.model), dtype(plan));
        let weights = load_whole(device, &plan.model, dtype, &params)?;
        drop(params);
        let (model, weights, source) = (&model, &weights, &file.source);
        let generator = trainer::Generator { device, model, weights, dtype, source };
        trainer::generate(generator, &wanted, |text| print_part!("{text}"))?;
        print_line!("\n");
    }
    print_line!("everything is in {}", folder.display());
    Ok(())
}
