//! From the command line to a world: ranks as threads, as processes that this command starts itself,
//! or as what a launcher has made of this process.

use anyhow::{Context, bail};
use lockstep_comm::launch::{Identity, LOG_DIR, Source, this_program};
use lockstep_comm::{LocalLinks, Options, World, on_threads_with};
use std::path::PathBuf;
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

/// Runs `rank` on every rank: in the world that a launcher has put this process into, or else in one
/// of `ranks` ranks on this machine.
pub fn run(
    engine: Engine,
    ranks: Option<usize>,
    timeout: Duration,
    rank: impl Fn(&World) -> anyhow::Result<()> + Sync,
) -> anyhow::Result<ExitCode> {
    if ranks == Some(0) {
        bail!("--ranks 0: a world has at least one rank");
    }
    let options = Options {
        local: if engine == Engine::Tcp { LocalLinks::Tcp } else { LocalLinks::SharedMemory },
        timeout,
        // Beside the logs, if a launcher keeps some.
        record: Some(std::env::var_os(LOG_DIR).map_or_else(|| "runs/flight".into(), PathBuf::from)),
        ..Options::default()
    };
    if engine == Engine::Threads {
        let ends = on_threads_with(&options, ranks.unwrap_or_else(default_ranks), |w| rank(&w));
        ends.into_iter().collect::<anyhow::Result<()>>()?;
        return Ok(ExitCode::SUCCESS);
    }
    #[cfg(feature = "mpi")]
    if engine == Engine::Mpi {
        let bind = Identity::from_process_env().ok().and_then(|identity| identity.bind);
        rank(&World::join_mpi(&Options { bind, ..options })?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let identity = Identity::from_process_env()?;
    // Ranks are asked for, and no launcher named a rank for this very process: start our own. A
    // batch script of Slurm has some of a rank's variables without being one.
    let ours = identity.source == Source::Alone
        || (ranks.is_some() && identity.source != Source::Explicit);
    if !ours {
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
    match ranks.unwrap_or_else(default_ranks) {
        1 => {
            rank(&World::join(&Identity::from_env(&|_| None)?, &options)?)?;
            Ok(ExitCode::SUCCESS)
        }
        many => start_own(many),
    }
}

fn default_ranks() -> usize {
    std::thread::available_parallelism().map_or(2, |n| n.get()).max(2)
}

/// This very command once per rank; only rank 0 is shown.
fn start_own(ranks: usize) -> anyhow::Result<ExitCode> {
    let logs = std::env::temp_dir().join(format!("lockstep-{}", std::process::id()));
    let spec = this_program(ranks, &logs)?;
    let outcome = lockstep_comm::launch::launch(&spec).context("starting the ranks")?;
    match outcome.failure {
        Some(failure) => {
            eprintln!("{failure}");
            eprintln!("the logs of all ranks are in {}", logs.display());
        }
        None => drop(std::fs::remove_dir_all(&logs)),
    }
    Ok(ExitCode::from(outcome.exit_code.clamp(0, 255) as u8))
}
