//! `lockstep trees train`: trains the trees that a run file describes.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use lockstep_ckpt::RunLock;
use lockstep_comm::World;
use lockstep_gbdt::{self as gbdt, Checkpoint, Config, Team};
use lockstep_launch::{EXIT_PERMANENT, EXIT_STOPPED};
use lockstep_trainer::check_consistency;

use super::file;
use super::output::Output;
use crate::commands::output::Bar;
use crate::print::{print_error, print_line, with_causes};
use crate::run_file::create_run_folder;
use crate::supervise::{self, Supervised, Supervision};
use crate::world::{self, Engine};
use crate::{consistency, stop};

/// Train the trees that a run file describes
///
/// Starts the ranks on this machine, or joins the ranks that a launcher started. All output is written to RUNS/NAME:
/// model.json and model.ubj (XGBoost's formats), metrics.jsonl, tensorboard/, logs/, checkpoints/ and the binned data.
/// The model is the same for any number of ranks and threads. An existing run with the same name is renamed to NAME.1,
/// NAME.2, …
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
    /// Number of ranks [default: run.ranks of the run file]
    #[arg(long)]
    ranks: Option<usize>,
    /// Override a key of the run file, e.g. --set trees.eta=0.1
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// How ranks run and communicate
    #[arg(long, value_enum, default_value = "shm")]
    engine: Engine,
    /// Resume from the newest checkpoint; with =if-any, start from scratch if there is none
    #[arg(long, value_enum, value_name = "WHEN", num_args = 0..=1, require_equals = true, default_missing_value = "always")]
    resume: Option<Resume>,
    /// Directory that contains run folders
    #[arg(long, default_value = "runs")]
    runs: PathBuf,
    #[command(flatten)]
    supervision: Supervision,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Resume {
    /// Fail if there is no checkpoint
    Always,
    /// Start from scratch if there is no checkpoint, so that the same command starts and resumes a run
    IfAny,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let config = file::read(&args.run, &args.sets)?;
    let mut start = world::Start {
        engine: args.engine,
        ranks: args.ranks,
        default_ranks: args.supervision.max_ranks.unwrap_or(config.run.ranks),
        logs: None,
    };
    let parent = world::is_parent(&start, args.supervision.nnodes.is_some())?;
    if !parent && args.supervision.elastic() {
        // The launcher decides the number of ranks.
        start.ranks = None;
    }
    let size = match (world::size(&start)?, parent) {
        // The tasks of a batch system are launchers, not ranks.
        (_, true) => args.ranks.unwrap_or(start.default_ranks),
        (size, false) => size,
    };
    let folder = folder(&args, &config);
    if parent {
        let _lock = match args.supervision.is_first() {
            true => Some(prepare(&args, &config)?),
            false => None,
        };
        return supervise(&args, &config, size, &folder);
    }
    stop::install_handlers();
    let timeout = Duration::try_from_secs_f64(config.run.timeout_s).context("run.timeout_s")?;
    let stopped = AtomicBool::new(false);
    let ended = world::run(&start, timeout, |world| {
        stopped.fetch_or(rank(&args, &config, world)?, Ordering::Relaxed);
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

fn folder(args: &Args, config: &Config) -> PathBuf {
    args.runs.join(config.name.as_deref().unwrap_or("trees"))
}

/// Any number of ranks trains the same model, so ranks that are lost need not come back.
fn supervise(
    args: &Args,
    config: &Config,
    ranks: usize,
    folder: &Path,
) -> anyhow::Result<ExitCode> {
    let (least, most) = supervise::limits(&args.supervision, ranks)?;
    let fit = move |available: usize| (available >= least).then_some(available.min(most));
    let digest = blake3::hash(&serde_json::to_vec(config)?).into();
    let progress = Checkpoint::progress_since;
    let run = Supervised { digest, ranks, folder, fit: Box::new(fit), progress };
    supervise::supervise(&args.supervision, run)
}

/// Whether a restart would fail in the same way.
fn is_permanent(error: &anyhow::Error) -> bool {
    match error.downcast_ref::<gbdt::Error>() {
        Some(error) => !error.is_retryable(),
        None => !error
            .chain()
            .any(|cause| cause.is::<lockstep_comm::Error>() || cause.is::<std::io::Error>()),
    }
}

/// Creates and locks the run's folder, in the launcher or else on rank 0.
fn prepare(args: &Args, config: &Config) -> anyhow::Result<RunLock> {
    let folder = folder(args, config);
    // Later generations continue the run of the first one.
    if args.resume.is_some() || world::generation() > 0 {
        if args.resume == Some(Resume::Always) && Checkpoint::rounds(&folder).is_empty() {
            bail!("{} has no checkpoint to resume from", folder.display());
        }
        return Ok(RunLock::take(&folder)?);
    }
    let name = config.name.as_deref().unwrap_or("trees");
    let (lock, moved) = create_run_folder(&args.runs, name)?;
    if let Some(moved) = moved {
        // Ranks of the old run that are still alive must not write to the new one.
        lockstep_ckpt::claim(&folder, lockstep_ckpt::newest(&moved)?)?;
        // Binned data is used again if it fits.
        let _ = std::fs::rename(moved.join("binned"), folder.join("binned"));
        print_error!("renamed the existing run to {}", moved.display());
    }
    Ok(lock)
}

/// Trains on one rank. Returns whether training was stopped before its last round.
fn rank(args: &Args, config: &Config, world: &World) -> anyhow::Result<bool> {
    let first = world.rank() == 0;
    let folder = folder(args, config);
    if world.size() > 1 {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let mine = [
            ("program".to_string(), consistency::program_hash()?),
            ("run file".to_string(), serde_json::to_string(config)?),
        ];
        check_consistency(world, host.trim(), &mine)?;
    }
    // A launcher that supervises its ranks has locked the folder.
    let supervised = supervise::is_supervised();
    let prepared = match first && !supervised {
        true => prepare(args, config).map(Some),
        false => Ok(None),
    };
    let prepared = prepared.map_err(|error| gbdt::Error::Input(with_causes(&error)));
    let lock = gbdt::all_succeed(world, prepared)?;
    let generation = match (first, supervised) {
        (true, false) => lockstep_ckpt::advance(&folder)?,
        _ => u64::from(world::generation()),
    };
    let threads = match config.run.threads {
        0 => {
            let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
            (cores / world::local_ranks(world)).max(1)
        }
        threads => threads,
    };
    let team = Team::new(threads);
    let run = gbdt::Run {
        group: world,
        team: &team,
        config,
        folder: &folder,
        resume: args.resume.is_some() || supervised || world::generation() > 0,
        generation,
        stop: &stop::requested,
    };
    let bar = Bar::new(world::on_terminal()).into();
    let output = Output { config, ranks: world.size(), threads, bar };
    let finished = gbdt::run(&run, &mut |event| output.show(&event));
    output.clear();
    let finished = finished?;
    if first {
        match finished.stopped {
            true => print_line!(
                "stopped after round {} of {}; continue with --resume",
                finished.progress.round,
                config.trees.rounds
            ),
            false => output.finished(&finished),
        }
        print_line!("run folder: {}", folder.display());
    }
    // A rank that exits before the others would look like a failure to them.
    world.barrier()?;
    drop(lock);
    Ok(finished.stopped)
}
