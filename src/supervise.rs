//! `lockstep train` as the launcher of its ranks: on one host or as one of several, started anew when some fail, on
//! fewer when some are gone. Knows of the run only its folder and what its layout allows.

use std::io::IsTerminal;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use lockstep_comm::TokenSource;
use lockstep_launch::elastic::{self, Job, Patience};
use lockstep_launch::{LaunchSpec, SlurmNode, this_program};
use lockstep_plan::refit;

use crate::run_file::RunFile;
use crate::say::complain;
use crate::world::TERMINAL;

/// What happens when ranks or hosts fail
#[derive(clap::Args)]
#[command(next_help_heading = "Failures and hosts")]
pub struct Supervision {
    /// Go on with as few ranks as this when others are gone, on the best layout for them [default: all]
    #[arg(long, value_name = "N")]
    pub min_ranks: Option<usize>,
    /// Take as many ranks as this when they can be had [default: what the layout asks for]
    #[arg(long, value_name = "N")]
    pub max_ranks: Option<usize>,
    /// How often to start anew without a new checkpoint in between
    #[arg(long, default_value_t = 3, value_name = "N")]
    max_restarts: u32,
    /// Seconds that ranks have to save and stop after SIGTERM or SIGINT
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    grace: u64,
    /// Hosts; this command runs on each of them
    #[arg(long, value_name = "N")]
    pub nnodes: Option<usize>,
    /// Which of the hosts this is, from 0 [default: Slurm's number]
    #[arg(long, value_name = "N")]
    node_rank: Option<usize>,
    /// Ranks that this host can take [default: an equal share]
    #[arg(long, value_name = "N")]
    nproc_per_node: Option<usize>,
    /// The first host, where the others meet it [default: Slurm's first host]
    #[arg(long, value_name = "HOST")]
    master_addr: Option<String>,
    /// The port at which they do
    #[arg(long, default_value_t = lockstep_launch::DEFAULT_PORT, value_name = "PORT")]
    master_port: u16,
    /// File with the 64 hex digits that all hosts share; LOCKSTEP_TOKEN_FILE or LOCKSTEP_TOKEN do as well
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// The IP address to listen on
    #[arg(long, value_name = "IP")]
    bind: Option<IpAddr>,
    /// Seconds to wait for a host that was lost before going on without it
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    wait: u64,
}

impl Supervision {
    /// Whether the number of ranks may change.
    pub fn elastic(&self) -> bool {
        self.min_ranks.is_some() || self.max_ranks.is_some()
    }

    /// Whether this process is the first host's, which has the run's folder made.
    pub fn is_first(&self) -> bool {
        self.nnodes.is_none() || self.node().unwrap_or(0) == 0
    }

    fn node(&self) -> Option<usize> {
        self.node_rank.or_else(|| SlurmNode::from_process_env().map(|node| node.number))
    }
}

/// Tells ranks that their generation is the one that their launcher took in the run's folder.
const SUPERVISED: &str = "LOCKSTEP_SUPERVISED";

/// Whether this rank was started by [`run`].
pub fn is_supervised() -> bool {
    std::env::var_os(SUPERVISED).is_some()
}

/// Starts this very command once per rank and stays until the run is over. `ranks` is what is wanted; `run` the run's
/// folder.
pub fn run(
    args: &Supervision,
    file: &RunFile,
    ranks: usize,
    run: &Path,
) -> anyhow::Result<ExitCode> {
    let spec = spec(args, ranks, &run.join("logs"))?;
    let give_up = Duration::from_secs(600);
    let outcome = if spec.node_rank == 0 {
        let after_loss = Duration::from_secs(args.wait);
        let max_restarts = args.max_restarts;
        let patience = Patience { max_restarts, after_loss, give_up, ..Patience::default() };
        let job = job(args, file, ranks, run, spec.nnodes, patience)?;
        elastic::lead(&spec, job)
    } else {
        elastic::follow(&spec, give_up)
    };
    let outcome = outcome.context("starting the ranks")?;
    if outcome.failure.is_some() {
        complain!("the logs of all ranks are in {}", spec.log_dir.display());
    }
    Ok(ExitCode::from(u8::try_from(outcome.exit_code).unwrap_or(1)))
}

fn spec(args: &Supervision, ranks: usize, logs: &Path) -> anyhow::Result<LaunchSpec> {
    let nnodes = args.nnodes.unwrap_or(1);
    let here = args.nproc_per_node.unwrap_or(ranks.div_ceil(nnodes.max(1)));
    let mut spec = this_program(here, logs)?;
    spec.extra_env.push((SUPERVISED.into(), "1".into()));
    if std::io::stderr().is_terminal() {
        spec.extra_env.push((TERMINAL.into(), "1".into()));
    }
    spec.grace = Duration::from_secs(args.grace);
    // What ranks have is in the checkpoint; one that does not end by itself has nothing to add.
    spec.grace_after_failure = Duration::ZERO;
    if args.nnodes.is_none() {
        return Ok(spec);
    }
    let slurm = SlurmNode::from_process_env();
    let Some(node_rank) = args.node() else {
        bail!("--nnodes {nnodes}, but which of them is this? say --node-rank, from 0");
    };
    let master = args.master_addr.clone().or(slurm.map(|node| node.first_host));
    let Some(master_addr) = master.or((nnodes == 1).then(|| spec.master_addr.clone())) else {
        bail!("--nnodes {nnodes}, but where is the first? say --master-addr HOST");
    };
    let token = crate::commands::launch::token(args.token_file.clone(), nnodes);
    if token == TokenSource::None && nnodes == 1 && args.elastic() {
        tracing::warn!("without a token no other host can join");
    }
    Ok(LaunchSpec {
        nnodes,
        node_rank,
        master_addr,
        master_port: args.master_port,
        token,
        bind: args.bind,
        ..spec
    })
}

fn job(
    args: &Supervision,
    file: &RunFile,
    ranks: usize,
    run: &Path,
    nodes: usize,
    patience: Patience,
) -> anyhow::Result<Job> {
    let (least, most) = (args.min_ranks.unwrap_or(ranks), args.max_ranks.unwrap_or(ranks));
    if least > most {
        bail!("--min-ranks {least} is more than the {most} ranks that are wanted; give less");
    }
    let (config, around, elastic) = (file.config.clone(), file.around(most, most), args.elastic());
    let fit = move |here: usize| {
        if !elastic {
            return (here >= ranks).then_some(ranks);
        }
        let mut around = around.clone();
        around.ranks = here.min(most);
        let found = refit(&config, &around).map(|config| config.ranks());
        found.filter(|ranks| *ranks >= least)
    };
    if fit(most).is_none() {
        bail!(
            "there is no layout of {least} to {most} ranks for this run; `lockstep train --dry-run` says what is wrong"
        );
    }
    let (folder, saved) = (run.to_path_buf(), run.to_path_buf());
    let mut last = None;
    let next = move || {
        // Once begun, a launcher only goes on with its own: one that was taken for dead and comes back finds that
        // another has taken its place.
        let taken = match last {
            None => lockstep_ckpt::advance(&folder),
            Some(last) => lockstep_ckpt::succeed(&folder, last),
        };
        let next = taken.map_err(|error| error.to_string())?;
        last = Some(next);
        u32::try_from(next).map_err(|_| format!("generation {next} is beyond counting"))
    };
    let progress = move || lockstep_ckpt::steps(&saved).first().copied().unwrap_or(0);
    Ok(Job::new(nodes, most, patience, fit, next, progress))
}
