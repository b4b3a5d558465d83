//! From the command line to a world: ranks as threads, as processes that this command starts, or as processes that a
//! launcher started.

use crate::print::print_error;
use anyhow::{Context, bail};
use lockstep_comm::{Identity, Launcher, LocalLinks, Options, World, on_threads_with};
use lockstep_launch::{LOG_DIR, identity, this_program};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// How ranks run and communicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Engine {
    /// Threads of this process
    Threads,
    /// Processes with shared memory; TCP between hosts
    Shm,
    /// Processes over TCP, even on one host
    Tcp,
    /// Processes started by mpirun or srun, with MPI collectives (needs the cargo feature mpi)
    Mpi,
}

impl Engine {
    pub fn name(self) -> &'static str {
        match self {
            Engine::Threads => "threads",
            Engine::Shm => "shm",
            Engine::Tcp => "tcp",
            Engine::Mpi => "mpi",
        }
    }

    /// Whether groups count the bytes that they send. MPI does not report them.
    pub fn counts_traffic(self) -> bool {
        self != Engine::Mpi
    }
}

/// How to create a world.
pub struct Start {
    pub engine: Engine,
    /// Value of --ranks. It is an error if a launcher started a different number.
    pub ranks: Option<usize>,
    /// Used without --ranks and without a launcher.
    pub default_ranks: usize,
    /// Directory for the ranks' logs. Default: a temporary one that is removed after success.
    pub logs: Option<PathBuf>,
}

/// The number of ranks of the world that this process belongs to or will start.
pub fn size(start: &Start) -> anyhow::Result<usize> {
    if start.ranks == Some(0) {
        bail!("--ranks must be at least 1 (got 0)");
    }
    if start.engine == Engine::Mpi && !cfg!(feature = "mpi") {
        bail!(
            "--engine mpi needs the cargo feature `mpi`; run scripts/install-mpi.sh and build with --features mpi"
        );
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

/// Whether this command starts its own ranks: no launcher did, or --ranks is given and the launcher's variables may not
/// be meant for this process. A batch script of Slurm has some of a rank's variables without being a rank.
fn starts_own(identity: &Identity, ranks: Option<usize>) -> bool {
    identity.launcher == Launcher::Standalone
        || (ranks.is_some() && identity.launcher != Launcher::Explicit)
}

/// Whether this process starts ranks and is not a rank itself. On several hosts the tasks of a batch system do that.
pub fn is_parent(start: &Start, several_hosts: bool) -> anyhow::Result<bool> {
    let by_processes = match start.engine {
        Engine::Shm | Engine::Tcp => true,
        Engine::Mpi | Engine::Threads => false,
    };
    let identity = identity::from_process_env()?;
    let launcher = several_hosts && identity.launcher != Launcher::Explicit;
    Ok(by_processes && (launcher || starts_own(&identity, start.ranks)))
}

/// Whether this process starts all ranks.
pub fn starts_all(start: &Start) -> anyhow::Result<bool> {
    #[cfg(feature = "mpi")]
    if start.engine == Engine::Mpi {
        return Ok(false);
    }
    let own = starts_own(&identity::from_process_env()?, start.ranks);
    Ok(own || start.engine == Engine::Threads)
}

/// Runs `rank` on every rank, in the world of the launcher that started this process or in a new one on this host.
/// `timeout` is that of collectives.
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
        // Next to the logs, if a launcher writes them.
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
                "--ranks {asked} contradicts the launcher, which started {} ranks; omit --ranks",
                identity.size
            );
        }
        if identity.rank == 0 && matches!(identity.launcher, Launcher::OpenMpi | Launcher::Pmi) {
            print_error!(
                "note: mpirun started the ranks; they communicate with the {} engine, not with MPI (--engine mpi)",
                engine.name()
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

/// Whether a launcher started this process as a rank.
pub fn is_launched() -> bool {
    identity::from_process_env().is_ok_and(|identity| identity.launcher == Launcher::Explicit)
}

/// Number of restarts so far, as reported by the launcher.
pub fn generation() -> u32 {
    identity::from_process_env().map_or(0, |identity| identity.generation)
}

/// Maximum number of ranks on one host. The same value on all ranks, so that they resolve the same plan.
pub fn local_ranks(world: &World) -> usize {
    let hosts = world.hosts();
    let on = |host: &usize| hosts.iter().filter(|other| *other == host).count();
    hosts.iter().map(on).max().unwrap_or(1)
}

/// The number of cores, but at least two.
pub fn default_ranks() -> usize {
    std::thread::available_parallelism().map_or(2, |n| n.get()).max(2)
}

/// Starts this command once per rank and shows the output of rank 0.
fn start_own(ranks: usize, logs: Option<&Path>) -> anyhow::Result<ExitCode> {
    let temporary = std::env::temp_dir().join(format!("lockstep-{}", std::process::id()));
    let mut spec = this_program(ranks, logs.unwrap_or(&temporary))?;
    spec.transport = identity::transport_from_process_env()?;
    if std::io::stderr().is_terminal() {
        spec.extra_env.push((TERMINAL.into(), "1".into()));
    }
    let outcome = lockstep_launch::launch(&spec).context("cannot run the ranks")?;
    match outcome.failure {
        Some(failure) => {
            print_error!("{failure}");
            print_error!("the logs of all ranks are in {}", spec.log_dir.display());
        }
        None => drop(std::fs::remove_dir_all(&temporary)),
    }
    Ok(ExitCode::from(outcome.exit_code.clamp(0, 255) as u8))
}

/// Set for ranks whose output is forwarded to a terminal.
pub const TERMINAL: &str = "LOCKSTEP_TERMINAL";

/// Whether standard error is shown on a terminal.
pub fn on_terminal() -> bool {
    std::io::stderr().is_terminal() || std::env::var_os(TERMINAL).is_some()
}
