//! `lockstep train`: trains the model that a run file describes.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use lockstep_ckpt::RunLock;
use lockstep_comm::World;
use lockstep_events::StepReport;
use lockstep_kernels::Tag;
use lockstep_launch::{EXIT_PERMANENT, EXIT_STOPPED};
use lockstep_model::{Model, Sampling};
use lockstep_plan::{Ledger, Plan};
use lockstep_trainer::{self as trainer, Event, HostTensors, Prompt, Rank, Run, dtype, load_whole};

use crate::commands::device;
use crate::commands::output::{self, Output, Style};
use crate::commands::prediction::{self, Prediction};
use crate::commands::replay::{self, ReplayRequest};
use crate::commands::{dash, doctor};
use crate::print::{print_error, print_line, print_part, with_causes};
use crate::run_file::{RunFile, create_run_folder};
use crate::supervise::{self, GraceCheck, Supervision};
use crate::world::{self, Engine};
use crate::{consistency, stop};

/// Train the model that a run file describes
///
/// Starts the ranks on this machine, or joins the ranks that a launcher started. All output is written to RUNS/NAME:
/// plan.json, metrics.jsonl, tensorboard/, logs/ and checkpoints/. An existing run with the same name is renamed to
/// NAME.1, NAME.2, …
///
/// When a rank fails, all ranks restart from the newest checkpoint. On SIGTERM or SIGINT they save a checkpoint and
/// stop.
///
/// Exit codes: 0 when training is finished; 75 when it was stopped by a signal and saved (run the same command with
/// --resume=if-any to continue); 128 + the signal when it was killed before it could save; other codes on failure.
#[derive(clap::Args)]
pub struct Args {
    /// Run file (TOML)
    run: PathBuf,
    /// Number of ranks [default: the ranks of the layout in the run file]
    #[arg(long)]
    ranks: Option<usize>,
    /// Override a key of the run file, e.g. --set train.lr=1e-3
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// How ranks run and communicate
    #[arg(long, value_enum, default_value = "shm")]
    engine: Engine,
    /// Start from the weights of this run or checkpoint (see `lockstep import`); keys that `[model]` does not set are
    /// those of the checkpoint [default: random weights]
    #[arg(long, value_name = "RUN|CHECKPOINT", conflicts_with = "resume")]
    from: Option<PathBuf>,
    /// Resume from the newest checkpoint; with =if-any, start from scratch if there is none
    #[arg(long, value_enum, value_name = "WHEN", num_args = 0..=1, require_equals = true, default_missing_value = "always")]
    resume: Option<Resume>,
    /// Directory that contains run folders
    #[arg(long, default_value = "runs")]
    runs: PathBuf,
    /// Replay step N twice from the saved state and report whether the data or a machine caused the failure; changes
    /// nothing, and adds the verdict to RUNS/NAME/logs/replays.jsonl for `lockstep doctor`
    #[arg(long, value_name = "N", conflicts_with = "resume")]
    replay_step: Option<u64>,
    /// Machine description (from `bench machine`) used to predict the step time [default: RUNS/machine.toml if it
    /// exists]
    #[arg(long, value_name = "FILE")]
    cluster: Option<String>,
    /// Record a timeline of these steps, e.g. 20..23, in RUNS/NAME/trace; the same as --set trace.steps=20..23. SIGUSR1
    /// to the training process or `lockstep trace --request` record one later
    #[arg(long, value_name = "A..B")]
    trace: Option<String>,
    /// Serve the web page of `lockstep dash` while training, on a free port of the loopback address
    #[arg(long)]
    dash: bool,
    /// Print the resolved plan as JSON and exit
    #[arg(long)]
    dry_run: bool,
    /// Print only warnings, errors and the verdict at the end
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
    /// Print a JSON object per report, as in metrics.jsonl, instead of text
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    supervision: Supervision,
}

impl Args {
    /// The run or checkpoint whose model is used for keys that `[model]` does not set.
    fn base(&self, name: &str) -> Option<PathBuf> {
        let continues = self.resume.is_some() || self.replay_step.is_some();
        self.from.clone().or_else(|| continues.then(|| self.runs.join(name)))
    }

    fn style(&self) -> Style {
        match (self.quiet, self.json) {
            (true, _) => Style::Quiet,
            (false, true) => Style::Json,
            (false, false) => Style::Text,
        }
    }

    /// The arguments that identify this run.
    fn run_args(&self) -> Vec<String> {
        let path = |path: &Path| path.display().to_string();
        let mut args = vec![path(&self.run)];
        let mut add = |flag: &str, value: String| args.extend([flag.to_string(), value]);
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
        args
    }
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Resume {
    /// Fail if there is no checkpoint
    Always,
    /// Start from scratch if there is no checkpoint, so that the same command starts and resumes a run
    IfAny,
}

pub fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    if let Some(steps) = &args.trace {
        let steps = if steps.contains("..") { steps.clone() } else { format!("{steps}..{steps}") };
        args.sets.push(format!("trace.steps={steps}"));
    }
    let file = RunFile::read_with_base(&args.run, &args.sets, |name| args.base(name))?;
    let mut start = world::Start {
        engine: args.engine,
        ranks: args.ranks,
        default_ranks: args.supervision.max_ranks.unwrap_or(file.config.ranks()),
        logs: None,
    };
    let parent = world::is_parent(&start, args.supervision.nnodes.is_some())?;
    if !parent && args.supervision.elastic() {
        // The launcher decides the number of ranks.
        start.ranks = None;
    }
    // Report configuration errors before any rank starts.
    let size = match (world::size(&start)?, parent) {
        // The tasks of a batch system are launchers, not ranks.
        (_, true) => args.ranks.unwrap_or(start.default_ranks),
        (size, false) => size,
    };
    let plan = plan(&args, &file, size, size)?;
    if args.dry_run {
        print_line!("{}", serde_json::to_string_pretty(&plan)?);
        return Ok(ExitCode::SUCCESS);
    }
    prediction::check_trainable(&plan)?;
    if world::starts_all(&start)? {
        prediction::check_memory(&plan)?;
    }
    // A replay is not supervised and does not write to the run's folder.
    if parent && args.replay_step.is_none() {
        let _lock = match args.supervision.is_first() {
            true => Some(prepare(&args, &plan)?),
            false => None,
        };
        let folder = args.runs.join(&plan.name);
        stop::trace_on_signal(&folder);
        if args.dash && args.supervision.is_first() {
            dash::start(args.runs.clone())?;
        }
        return supervise::run(&args.supervision, &file, &plan, size, &folder);
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
        Err(error) if world::is_launched() && is_permanent(&error) => {
            print_error!("error: {}", with_causes(&error));
            Ok(ExitCode::from(EXIT_PERMANENT as u8))
        }
        ended => ended,
    }
}

fn plan(args: &Args, file: &RunFile, ranks: usize, local: usize) -> anyhow::Result<Plan> {
    match args.supervision.elastic() {
        true => file.refit_plan(ranks, local),
        false => file.plan(ranks, local),
    }
}

fn plan_of_rank(args: &Args, file: &RunFile, world: &World) -> anyhow::Result<Plan> {
    let plan = plan(args, file, world.size(), world::local_ranks(world))?;
    if plan.ranks != world.size() {
        bail!(
            "the layout uses {} of the {} started ranks; start {} ranks",
            plan.ranks,
            world.size(),
            plan.ranks
        );
    }
    Ok(plan)
}

/// Whether a restart would fail in the same way. Communication, checkpoint and I/O errors may be caused by a machine and
/// are retryable; errors of the configuration or the arithmetic are permanent.
fn is_permanent(error: &anyhow::Error) -> bool {
    use trainer::Error::{Checkpoint, Comm, Diverged, Folder, OtherRank};
    let is_retryable = |error: &trainer::Error| {
        matches!(
            error,
            Comm(_) | Checkpoint(_) | Diverged { .. } | Folder { .. } | OtherRank { .. }
        )
    };
    match error.downcast_ref::<trainer::Error>() {
        Some(Checkpoint(lockstep_ckpt::Error::Fenced { .. })) => true,
        Some(error) => !is_retryable(error),
        None => !error
            .chain()
            .any(|cause| cause.is::<lockstep_comm::Error>() || cause.is::<std::io::Error>()),
    }
}

/// Creates and locks the run's folder, in the launcher or else on rank 0.
fn prepare(args: &Args, plan: &Plan) -> anyhow::Result<RunLock> {
    let folder = args.runs.join(&plan.name);
    // Later generations continue the run of the first one.
    if args.resume.is_some() || world::generation() > 0 {
        // The ranks find out which checkpoints are valid.
        if args.resume == Some(Resume::Always) && lockstep_ckpt::steps(&folder).is_empty() {
            return Err(lockstep_ckpt::Error::NotFound { path: folder }.into());
        }
        return Ok(RunLock::take(&folder)?);
    }
    if let Some(from) = args.from.as_ref().filter(|from| is_inside(from, &folder)) {
        let from = from.display();
        bail!(
            "--from {from} is in the folder of this run; choose another name with --set name=NAME"
        );
    }
    let (lock, moved) = create_run_folder(&args.runs, &plan.name)?;
    if let Some(moved) = moved {
        // Ranks of the old run that are still alive must not write to the new one.
        lockstep_ckpt::claim(&folder, lockstep_ckpt::newest(&moved)?)?;
        print_error!("renamed the existing run to {}", moved.display());
    }
    Ok(lock)
}

/// Whether `path` is inside `folder`. False if either does not exist.
fn is_inside(path: &Path, folder: &Path) -> bool {
    match (path.canonicalize(), folder.canonicalize()) {
        (Ok(path), Ok(folder)) => path.starts_with(folder),
        _ => false,
    }
}

/// Trains on one rank. Returns whether training was stopped before its last step.
fn rank(args: &Args, file: &RunFile, plan: &Plan, world: &World) -> anyhow::Result<bool> {
    let first = world.rank() == 0;
    consistency::check(world, plan, file)?;
    let folder = args.runs.join(&plan.name);
    if let Some(step) = args.replay_step {
        let from = args.from.as_ref().map(|from| lockstep_ckpt::find(from)).transpose()?;
        let from = from.map(|checkpoint| trainer::Start { checkpoint, resume: false });
        let request = ReplayRequest { plan, source: &file.source, folder: &folder, from, step };
        replay::run(request, world)?;
        return Ok(false);
    }
    let (style, entropy) = (args.style(), file.source.entropy(plan.data.seq));
    let prediction =
        Prediction::new(plan, world, args.engine, args.cluster.as_deref(), &args.runs)?;
    // A launcher that supervises its ranks has locked the folder.
    let lock = match first && !supervise::is_supervised() {
        true => Some(prepare(args, plan)?),
        false => None,
    };
    if first {
        let path = folder.join("plan.json");
        std::fs::write(&path, serde_json::to_string_pretty(plan)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        file.source.stored_tokenizer().write(&folder)?;
        if style == Style::Text {
            output::print_header(plan, &file.source);
        }
        output::print_warnings(plan, &file.source);
        if style == Style::Text {
            prediction.print(plan);
        }
    }
    stop::trace_on_signal(&folder);
    let start = start(args, world, &folder)?;
    let mut output = Output::new(style, world::on_terminal(), entropy);
    let source = &file.source;
    let generation = supervise::is_supervised().then(|| u64::from(world::generation()));
    let device = device::open(plan, world)?;
    prediction::check_device_memory(plan, world.rank(), &device)?;
    let describes = first && style == Style::Text;
    if let Some(line) = device::describe(&device, plan).filter(|_| describes) {
        print_line!("{line}");
    }
    device::open_collectives(plan, world, &device)?;
    let stop = &stop::requested;
    let run = Run { plan, device, group: world, source, folder: &folder, start, generation, stop };
    let mut grace = GraceCheck::new(&args.supervision);
    let finished = trainer::run(&run, &mut |event| {
        output.show(&event);
        check_grace(&mut grace, plan, &event);
    });
    output.clear();
    let trainer::Finished { rank: trained, stopped, snapshot_bytes } =
        finished.map_err(|error| with_advice(args, plan, error))?;
    if let Some(step) = stopped {
        if first && style != Style::Json {
            print_line!(
                "stopped after step {step} of {}; continue with --resume",
                plan.train.steps
            );
        }
        // A rank that exits before the others would look like a failure to them.
        world.barrier()?;
        return Ok(true);
    }
    // Rank 0 generates the sample and needs all parameters.
    let sampled = plan.train.sample.is_some() && style == Style::Text;
    let params = if sampled { trained.params()? } else { None };
    trainer::on_rank_zero(world, || {
        if style == Style::Text {
            print_memory(&trained, snapshot_bytes as usize);
            prediction.compare(plan, &output.measured);
            print_sample(&trained, params, file)?;
        }
        if style != Style::Json {
            conclude(&folder, plan.ranks);
        }
        anyhow::Ok(())
    })?;
    // A rank that exits before the others would look like a failure to them.
    world.barrier()?;
    drop(lock);
    Ok(false)
}

/// Warns if a signal could not be followed by a save in time.
fn check_grace(grace: &mut GraceCheck, plan: &Plan, event: &Event<'_>) {
    match event {
        Event::Saved(saved) => grace.saved(saved.time),
        Event::Step(StepReport { tokens_per_s: Some(rate), .. }) if *rate > 0.0 => {
            let step = Duration::from_secs_f64(plan.tokens_per_step() as f64 / rate);
            if let Some(warning) = grace.stepped(step) {
                print_error!("warning: {warning}");
            }
        }
        _ => {}
    }
}

/// The checkpoint to start from. Rank 0 decides for all ranks whether the run resumes.
fn start(args: &Args, world: &World, folder: &Path) -> anyhow::Result<Option<trainer::Start>> {
    // Later generations continue the run of the first one.
    let restarted = supervise::is_supervised() || world::generation() > 0;
    let resume = match (restarted, args.resume) {
        (false, None) => false,
        (false, Some(Resume::Always)) => true,
        _ => !lockstep_ckpt::steps(folder).is_empty(),
    };
    let mut resume = [i64::from(resume)];
    world.broadcast(&mut resume, 0)?;
    let (checkpoint, resume) = match (resume[0] > 0, &args.from) {
        (true, _) => (folder.to_path_buf(), true),
        (false, Some(from)) => (from.clone(), false),
        (false, None) => return Ok(None),
    };
    Ok(Some(trainer::Start { checkpoint, resume }))
}

/// Adds the command that replays the step to an error about a step that is not finite.
fn with_advice(args: &Args, plan: &Plan, error: trainer::Error) -> anyhow::Error {
    match error {
        trainer::Error::OutOfMemory(error) => {
            anyhow::anyhow!("{error}{}", prediction::ways_to_fit(plan))
        }
        trainer::Error::NotFinite { step, .. } => {
            let message = error.to_string();
            anyhow::anyhow!(
                "{message}. To find out whether the data or a machine caused it, run:\n  {}",
                replay::command(&args.run_args(), step)
            )
        }
        error => error.into(),
    }
}

/// Prints planned and measured memory of a rank.
fn print_memory(rank: &Rank<'_>, snapshot: usize) {
    let planned = Ledger::of(rank.plan, rank.group.rank());
    let memory = rank.device.memory();
    let tagged = |tag: Tag, planned: usize| (tag.name(), planned, memory.of(tag).peak);
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    print_line!("peak memory of rank {}, planned and measured:", rank.group.rank());
    for (name, planned, measured) in [
        tagged(Tag::Parameters, planned.parameters),
        tagged(Tag::Gradients, planned.gradients),
        tagged(Tag::Optimizer, planned.optimizer),
        tagged(Tag::Activations, planned.activations),
        ("snapshot", planned.snapshot, snapshot),
    ] {
        print_line!("  {name:<12} {:>9.2} {:>9.2} MiB", mib(planned), mib(measured));
    }
    let (planned, memory) = (planned.offloaded, rank.device.offloaded_memory());
    for (tag, planned) in [
        (Tag::Parameters, planned.parameters),
        (Tag::Gradients, planned.gradients),
        (Tag::Optimizer, planned.optimizer),
        (Tag::Activations, planned.activations),
    ] {
        if planned > 0 {
            let (name, measured) = (tag.name(), memory.of(tag).peak);
            print_line!("  {name:<12} {:>9.2} {:>9.2} MiB (host)", mib(planned), mib(measured));
        }
    }
}

/// Prints the sample text.
fn print_sample(
    rank: &Rank<'_>,
    params: Option<HostTensors>,
    file: &RunFile,
) -> anyhow::Result<()> {
    let plan = rank.plan;
    if let (Some(sample), Some(params)) = (&plan.train.sample, params) {
        print_part!("\n{}", sample.prompt);
        let sampling = Sampling { temperature: 0.8, top_k: None, top_p: Some(0.95) };
        let prompt = Prompt {
            prompt: &sample.prompt,
            tokens: sample.tokens,
            sampling,
            seed: plan.train.seed,
        };
        let (device, model, dtype) = (&rank.device, Model::whole(&plan.model), dtype(plan));
        let weights = load_whole(device, &plan.model, dtype, &params)?;
        drop(params);
        let (model, weights, tokenizer) = (&model, &weights, file.source.tokenizer()?);
        let generator = trainer::Generator { device, model, weights, dtype, tokenizer };
        trainer::generate(generator, &prompt, |text| print_part!("{text}"))?;
        print_line!("\n");
    }
    Ok(())
}

/// Prints the doctor's verdict and the run folder.
fn conclude(folder: &Path, ranks: usize) {
    if let Some(verdict) = doctor::verdict(folder, ranks) {
        print_line!("doctor: {verdict}");
    }
    print_line!("run folder: {}", folder.display());
}
