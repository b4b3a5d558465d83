//! From the command line to a world: ranks as threads, as processes that this command starts itself,
//! or as what a launcher has made of this process.

use crate::say::complain;
use anyhow::{Context, bail};
use lockstep_comm::{Identity, Launcher};
use lockstep_comm::{LocalLinks, Options, World, on_threads_with};
use lockstep_launch::{LOG_DIR, identity, this_program};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Engine {
    /// Threads of this process
    Threads,
    /// Processes that share memory; TCP between hosts
    Shm,
    /// Processes over TCP, even on one host
    Tcp,
    /// Processes that mpirun or srun started, over MPI's own collectives
    #[cfg(feature = "mpi")]
    Mpi,
}

impl Engine {
    pub fn name(self) -> &'static str {
        match self {
            Engine::Threads => "threads",
            Engine::Shm => "shm",
            Engine::Tcp => "tcp",
            #[cfg(feature = "mpi")]
            Engine::Mpi => "mpi",
        }
    }
}

/// How a world is to be made.
pub struct Start {
    pub engine: Engine,
    /// As typed: a launcher that started another number is a mistake.
    pub ranks: Option<usize>,
    /// When it was not typed and no launcher knows it.
    pub default_ranks: usize,
    /// Where the ranks' output goes; without it, into a folder that is removed after success.
    pub logs: Option<PathBuf>,
}

/// How many ranks this process is one of, or will start.
pub fn size(start: &Start) -> anyhow::Result<usize> {
    if start.ranks == Some(0) {
        bail!("--ranks 0: a world has at least one rank");
    }
    #[cfg(feature = "mpi")]
    if start.engine == Engine::Mpi {
        return Ok(start
            .ranks
            .unwrap_or_else(|| identity::from_process_env().map_or(1, |found| found.size)));
    }
    let identity = identity::from_process_env()?;
    let launched = start.engine != Engine::Threads && !starts_own(&identity, start.ranks);
    Ok(if launched { identity.size } else { start.ranks.unwrap_or(start.default_ranks) })
}

/// Ranks are asked for, and no launcher named a rank for this very process: start our own. A batch script of
/// Slurm has some of a rank's variables without being one.
fn starts_own(identity: &Identity, ranks: Option<usize>) -> bool {
    identity.launcher == Launcher::Standalone
        || (ranks.is_some() && identity.launcher != Launcher::Explicit)
}

/// Whether this process only starts ranks, and is none itself. On several hosts, that is what a batch system's tasks
/// are.
pub fn is_parent(start: &Start, several_hosts: bool) -> anyhow::Result<bool> {
    let by_processes = match start.engine {
        Engine::Shm | Engine::Tcp => true,
        #[cfg(feature = "mpi")]
        Engine::Mpi => false,
        Engine::Threads => false,
    };
    let identity = identity::from_process_env()?;
    let launcher = several_hosts && identity.launcher != Launcher::Explicit;
    Ok(by_processes && (launcher || starts_own(&identity, start.ranks)))
}

/// Whether all ranks come from this process, and none is there yet.
pub fn starts_all(start: &Start) -> anyhow::Result<bool> {
    #[cfg(feature = "mpi")]
    if start.engine == Engine::Mpi {
        return Ok(false);
    }
    let own = starts_own(&identity::from_process_env()?, start.ranks);
    Ok(own || start.engine == Engine::Threads)
}

/// Runs `rank` on every rank: in the world that a launcher has put this process into, or else in one
/// of our own on this machine. `timeout` is how long they wait for each other.
pub fn run(
    start: &Start,
    timeout: Duration,
    rank: impl Fn(&World) -> anyhow::Result<()> + Sync,
) -> anyhow::Result<ExitCode> {
    let Start { engine, ranks, .. } = *start;
    size(start)?;
    let options = Options {
        local: if engine == Engine::Tcp { LocalLinks::Tcp } else { LocalLinks::SharedMemory },
        timeout,
        // Beside the logs, if a launcher keeps some.
        record: Some(std::env::var_os(LOG_DIR).map_or_else(|| "runs/flight".into(), PathBuf::from)),
        ..Options::default()
    };
    if engine == Engine::Threads {
        let size = ranks.unwrap_or(start.default_ranks);
        let ends = on_threads_with(&options, size, |world| rank(&world));
        ends.into_iter().collect::<anyhow::Result<()>>()?;
        return Ok(ExitCode::SUCCESS);
    }
    #[cfg(feature = "mpi")]
    if engine == Engine::Mpi {
        let bind = identity::from_process_env().ok().and_then(|identity| identity.bind);
        rank(&World::join_mpi(&Options { bind, ..options })?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let identity = identity::from_process_env()?;
    if !starts_own(&identity, ranks) {
        if let Some(asked) = ranks.filter(|r| *r != identity.size) {
            bail!(
                "--ranks {asked}, but the launcher started {} ranks; leave --ranks out",
                identity.size
            );
        }
        let world = World::join(&identity, &options)?;
        rank(&world)?;
        return Ok(ExitCode::SUCCESS);
    }
    match ranks.unwrap_or(start.default_ranks) {
        1 => {
            rank(&World::join(&identity::from_env(&|_| None)?, &options)?)?;
            Ok(ExitCode::SUCCESS)
        }
        many => start_own(many, start.logs.as_deref()),
    }
}

/// Whether a launcher has made a rank of this process.
pub fn is_launched() -> bool {
    identity::from_process_env().is_ok_and(|identity| identity.launcher == Launcher::Explicit)
}

/// How often the ranks were started before, as far as somebody counts.
pub fn generation() -> u32 {
    identity::from_process_env().map_or(0, |identity| identity.generation)
}

/// How many ranks are on one host, at most: the same number for all, so that they come to the same plan.
pub fn local_ranks(world: &World) -> usize {
    let hosts = world.hosts();
    let on = |host: &usize| hosts.iter().filter(|other| *other == host).count();
    hosts.iter().map(on).max().unwrap_or(1)
}

/// As many as there are cores, and two at least: a world of one shows little.
pub fn default_ranks() -> usize {
    std::thread::available_parallelism().map_or(2, |n| n.get()).max(2)
}

/// This very command once per rank; only rank 0 is shown.
fn start_own(ranks: usize, logs: Option<&Path>) -> anyhow::Result<ExitCode> {
    let temporary = std::env::temp_dir().join(format!("lockstep-{}", std::process::id()));
    let mut spec = this_program(ranks, logs.unwrap_or(&temporary))?;
    if std::io::stderr().is_terminal() {
        spec.extra_env.push((TERMINAL.into(), "1".into()));
    }
    let outcome = lockstep_launch::launch(&spec).context("starting the ranks")?;
    match outcome.failure {
        Some(failure) => {
            complain!("{failure}");
            complain!("the logs of all ranks are in {}", spec.log_dir.display());
        }
        None => drop(std::fs::remove_dir_all(&temporary)),
    }
    Ok(ExitCode::from(outcome.exit_code.clamp(0, 255) as u8))
}

/// Tells rank 0 that what it writes is passed on to a terminal.
pub const TERMINAL: &str = "LOCKSTEP_TERMINAL";

/// Whether somebody watches standard error.
pub fn on_terminal() -> bool {
    std::io::stderr().is_terminal() || std::env::var_os(TERMINAL).is_some()
}
