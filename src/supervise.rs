//! `lockstep train` as the launcher of its ranks, on one host or as one of several: restarts them after failures, on
//! fewer ranks if some are lost. Knows only the run's folder and the layouts that fit.

use std::io::IsTerminal;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use lockstep_comm::TokenSource;
use lockstep_launch::elastic::{self, Job, RestartPolicy};
use lockstep_launch::{LaunchSpec, SlurmNode, this_program};
use lockstep_plan::{Plan, refit};
use lockstep_trainer::settings;

use crate::print::print_error;
use crate::run_file::RunFile;
use crate::world::TERMINAL;

/// Failures of ranks or hosts
#[derive(clap::Args)]
#[command(next_help_heading = "Failures and hosts")]
pub struct Supervision {
    /// Minimum number of ranks to continue with after losses, on the best layout for them [default: all ranks]
    #[arg(long, value_name = "N")]
    pub min_ranks: Option<usize>,
    /// Maximum number of ranks to use when more are available [default: the ranks of the layout]
    #[arg(long, value_name = "N")]
    pub max_ranks: Option<usize>,
    /// Maximum number of restarts without a new checkpoint
    #[arg(long, default_value_t = 3, value_name = "N")]
    max_restarts: u32,
    /// Seconds that ranks have to finish the step, save and stop after SIGTERM or SIGINT
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    grace: u64,
    /// Number of hosts; run this command on each of them [default: this host only]
    #[arg(long, value_name = "N")]
    pub nnodes: Option<usize>,
    /// Index of this host, from 0 [default: from Slurm]
    #[arg(long, value_name = "N")]
    node_rank: Option<usize>,
    /// Maximum number of ranks on this host [default: an equal share]
    #[arg(long, value_name = "N")]
    nproc_per_node: Option<usize>,
    /// Address of host 0 [default: from Slurm]
    #[arg(long, value_name = "HOST")]
    master_addr: Option<String>,
    /// Port of host 0 on which the other hosts connect
    #[arg(long, default_value_t = lockstep_launch::DEFAULT_PORT, value_name = "PORT")]
    master_port: u16,
    /// File with the shared token, 64 hex digits [default: LOCKSTEP_TOKEN_FILE or LOCKSTEP_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// IP address to listen on [default: derived from --master-addr]
    #[arg(long, value_name = "IP")]
    bind: Option<IpAddr>,
    /// Encrypt all traffic between ranks and launchers, with keys derived from the token [default: LOCKSTEP_ENCRYPT]
    #[arg(long)]
    encrypt: bool,
    /// Seconds to wait for a lost host before continuing without it
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    wait: u64,
}

impl Supervision {
    /// Whether the number of ranks may change.
    pub fn elastic(&self) -> bool {
        self.min_ranks.is_some() || self.max_ranks.is_some()
    }

    /// Whether this is host 0, which creates the run's folder.
    pub fn is_first(&self) -> bool {
        self.nnodes.is_none() || self.node().unwrap_or(0) == 0
    }

    fn node(&self) -> Option<usize> {
        self.node_rank.or_else(|| SlurmNode::from_process_env().map(|node| node.index))
    }
}

/// Warns once when the ranks could not finish a step and save it within the grace period.
pub struct GraceCheck {
    grace: Duration,
    save: Duration,
    warned: bool,
}

impl GraceCheck {
    pub fn new(args: &Supervision) -> GraceCheck {
        GraceCheck {
            grace: Duration::from_secs(args.grace),
            save: Duration::ZERO,
            // Other launchers have their own grace period.
            warned: !is_supervised(),
        }
    }

    /// A checkpoint was saved in this time.
    pub fn saved(&mut self, time: Duration) {
        self.save = time;
    }

    /// A step took this time. Returns the warning, if it is due.
    pub fn stepped(&mut self, step: Duration) -> Option<String> {
        let (needed, grace) = (step + self.save, self.grace.as_secs());
        if self.warned || needed <= self.grace {
            return None;
        }
        self.warned = true;
        Some(format!(
            "a step and a save take {:.1} s, but after SIGTERM or SIGINT the ranks are killed within --grace {grace} s, \
             before they have saved; set --grace {} or more",
            needed.as_secs_f64(),
            2 * needed.as_secs() + 1
        ))
    }
}

/// Set for ranks whose launcher allocates generations in the run's folder.
const SUPERVISED: &str = "LOCKSTEP_SUPERVISED";

/// Whether this rank was started by [`run`].
pub fn is_supervised() -> bool {
    std::env::var_os(SUPERVISED).is_some()
}

/// A run as its launcher sees it.
pub struct Supervised<'a> {
    /// Identifies the run to launchers.
    pub digest: [u8; 32],
    /// Number of ranks of the configuration.
    pub ranks: usize,
    /// The run's folder.
    pub folder: &'a Path,
    /// How many of the given number of ranks can work together; `None` if too few.
    pub fit: Box<dyn Fn(usize) -> Option<usize> + Send>,
    /// How far the run has come since a generation.
    pub progress: fn(&Path, u64) -> u64,
}

/// Starts this command once per rank and supervises the ranks until the run is finished. `ranks` is the number of ranks
/// of the layout, `run` the run's folder.
pub fn run(
    args: &Supervision,
    file: &RunFile,
    plan: &Plan,
    ranks: usize,
    run: &Path,
) -> anyhow::Result<ExitCode> {
    let (least, most) = limits(args, ranks)?;
    let (config, environment, elastic) =
        (file.config.clone(), file.environment(most, most), args.elastic());
    let fit = move |available: usize| {
        if !elastic {
            return (available >= ranks).then_some(ranks);
        }
        let mut environment = environment.clone();
        environment.ranks = available.min(most);
        let found = refit(&config, &environment).map(|config| config.ranks());
        found.filter(|ranks| *ranks >= least)
    };
    if fit(most).is_none() {
        bail!(
            "no layout with {least} to {most} ranks fits this run; run `lockstep train --dry-run` to see why"
        );
    }
    let progress = lockstep_ckpt::progress_since;
    let fit = Box::new(fit);
    supervise(args, Supervised { digest: digest(plan), ranks, folder: run, fit, progress })
}

/// Smallest and largest number of ranks.
pub fn limits(args: &Supervision, ranks: usize) -> anyhow::Result<(usize, usize)> {
    let (least, most) = (args.min_ranks.unwrap_or(ranks), args.max_ranks.unwrap_or(ranks));
    if least > most {
        bail!("--min-ranks {least} is larger than the maximum of {most} ranks");
    }
    Ok((least, most))
}

/// Starts this command once per rank and supervises the ranks until the run is finished.
pub fn supervise(args: &Supervision, run: Supervised<'_>) -> anyhow::Result<ExitCode> {
    let spec = spec(args, run.ranks, &run.folder.join("logs"))?;
    let spec = LaunchSpec { run: run.digest, ..spec };
    let outcome = match spec.node_rank {
        0 => elastic::run_coordinator(&spec, job(args, run)?),
        _ => elastic::run_agent(&spec, RestartPolicy::default().give_up),
    };
    let outcome = outcome.context("cannot run the ranks")?;
    if outcome.failure.is_some() {
        print_error!("the logs of all ranks are in {}", spec.log_dir.display());
    }
    Ok(ExitCode::from(u8::try_from(outcome.exit_code).unwrap_or(1)))
}

/// Identifies the run to launchers.
fn digest(plan: &Plan) -> [u8; 32] {
    blake3::hash(format!("{:?}", settings(plan)).as_bytes()).into()
}

fn spec(args: &Supervision, ranks: usize, logs: &Path) -> anyhow::Result<LaunchSpec> {
    let nnodes = args.nnodes.unwrap_or(1);
    let local = args.nproc_per_node.unwrap_or(ranks.div_ceil(nnodes.max(1)));
    let mut spec = this_program(local, logs)?;
    spec.transport = crate::commands::launch::transport(args.encrypt)?;
    spec.extra_env.push((SUPERVISED.into(), "1".into()));
    if std::io::stderr().is_terminal() {
        spec.extra_env.push((TERMINAL.into(), "1".into()));
    }
    spec.grace = Duration::from_secs(args.grace);
    // After a failure the state to resume from is the newest checkpoint, so ranks are killed at once.
    spec.grace_after_failure = Duration::ZERO;
    if args.nnodes.is_none() {
        return Ok(spec);
    }
    let slurm = SlurmNode::from_process_env();
    let Some(node_rank) = args.node() else {
        bail!("--nnodes {nnodes} needs --node-rank, the index of this host from 0");
    };
    let master = args.master_addr.clone().or(slurm.map(|node| node.first_host));
    let Some(master_addr) = master.or((nnodes == 1).then(|| spec.master_addr.clone())) else {
        bail!("--nnodes {nnodes} needs --master-addr, the address of host 0");
    };
    let token = crate::commands::launch::token(args.token_file.clone(), nnodes);
    if token == TokenSource::None && nnodes == 1 && args.elastic() {
        tracing::warn!("other hosts cannot join without a token; set --token-file");
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

fn job(args: &Supervision, run: Supervised<'_>) -> anyhow::Result<Job> {
    let (_, most) = limits(args, run.ranks)?;
    // No generation of this launcher has started yet.
    let (first, folder) = (Arc::new(AtomicU64::new(u64::MAX)), run.folder.to_path_buf());
    let progress = run.progress;
    Ok(Job {
        nodes: args.nnodes.unwrap_or(1),
        ranks: most,
        policy: RestartPolicy {
            max_restarts: args.max_restarts,
            loss_timeout: Duration::from_secs(args.wait),
            ..RestartPolicy::default()
        },
        fit: run.fit,
        next_generation: Box::new(generations(run.folder, first.clone())),
        progress: Box::new(move || progress(&folder, first.load(Ordering::Relaxed))),
    })
}

/// Allocates generations in the run's folder. After its first one, a launcher continues only its own sequence: if it
/// hung and another launcher took over the run meanwhile, it fails here. `first` is set to its first one.
fn generations(
    run: &Path,
    first: Arc<AtomicU64>,
) -> impl FnMut() -> Result<u32, String> + Send + use<> {
    let folder = run.to_path_buf();
    let mut last = None;
    move || {
        let allocated = match last {
            None => lockstep_ckpt::advance(&folder),
            Some(last) => lockstep_ckpt::advance_from(&folder, last),
        };
        let next = allocated.map_err(|error| error.to_string())?;
        last = Some(next);
        first.fetch_min(next, Ordering::Relaxed);
        u32::try_from(next).map_err(|_| format!("generation {next} is too large"))
    }
}
