//! `lockstep launch`: what was typed, turned into a `LaunchSpec`. Starts nothing itself.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lockstep_comm::TokenSource;
use lockstep_launch::{self as launch, LaunchSpec, Show};

/// Start ranks on this node, watch them, and end them together.
///
/// Every rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, GROUP_RANK,
/// MASTER_ADDR, MASTER_PORT, LOCKSTEP_TOKEN and LOCKSTEP_GENERATION in its environment; rank 0 also
/// LOCKSTEP_LISTEN_FD, a socket that listens on the port already. Standard input is empty.
///
/// All output goes to one file per rank. Rank 0's is also shown, as it comes; with --tee everyone's,
/// line by line. When a rank fails, its last lines are shown, the others are ended, and its exit
/// code becomes that of the launcher (128 + the signal if it was killed by one).
///
/// Ranks, and what they start in their process group, do not outlive the launcher's normal end. If
/// the launcher is killed with SIGKILL its ranks die too, but not the processes these started.
#[derive(clap::Args)]
pub struct Args {
    /// Ranks on this node: a number, or cpu, gpu or auto (the GPUs, or the cores if there are none)
    #[arg(long, default_value = "1", env = "PET_NPROC_PER_NODE", value_parser = ranks_per_node)]
    nproc_per_node: usize,
    /// Nodes in the job; one launcher runs on each
    #[arg(long, default_value_t = 1, env = "PET_NNODES")]
    nnodes: usize,
    /// Which of the nodes this is, from 0
    #[arg(long, default_value_t = 0, env = "PET_NODE_RANK")]
    node_rank: usize,
    /// The host of rank 0
    #[arg(long, default_value = "127.0.0.1", env = "PET_MASTER_ADDR")]
    master_addr: String,
    /// Where rank 0 listens; 0 is a free port on one node and 29500 on many
    #[arg(long, default_value_t = 0, env = "PET_MASTER_PORT")]
    master_port: u16,
    /// How often to start anew, as the next generation, after a rank failed
    #[arg(long, default_value_t = 0, env = "PET_MAX_RESTARTS")]
    max_restarts: u32,
    /// Folder for rank-N.log [default: runs/launch-TIME-PID/logs]
    #[arg(long)]
    log_dir: Option<PathBuf>,
    /// Show the output of all ranks, each line behind its rank: `[3] line`
    #[arg(long)]
    tee: bool,
    /// Seconds between SIGTERM and SIGKILL
    #[arg(long, default_value_t = 5)]
    grace: u64,
    /// File with the 64 hex digits that all nodes share; LOCKSTEP_TOKEN_FILE or LOCKSTEP_TOKEN do as well
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// The IP address for ranks to listen on
    #[arg(long)]
    bind: Option<IpAddr>,
    /// What to run, after `--`
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let outcome = launch::launch(&spec(args)?)?;
    Ok(ExitCode::from(u8::try_from(outcome.exit_code).unwrap_or(1)))
}

fn spec(args: Args) -> anyhow::Result<LaunchSpec> {
    if args.nnodes > 1 && matches!(args.master_addr.as_str(), "127.0.0.1" | "localhost") {
        tracing::warn!(
            "--master-addr {} is reached from this machine only; give the host of node 0",
            args.master_addr
        );
    }
    let log_dir = match args.log_dir {
        Some(dir) => dir,
        None => default_log_dir()?,
    };
    Ok(LaunchSpec {
        nnodes: args.nnodes,
        node_rank: args.node_rank,
        master_addr: args.master_addr,
        master_port: args.master_port,
        max_restarts: args.max_restarts,
        show: if args.tee { Show::All } else { Show::RankZero },
        grace: Duration::from_secs(args.grace),
        grace_after_failure: Duration::from_secs(args.grace),
        token: token(args.token_file, args.nnodes),
        bind: args.bind,
        ..LaunchSpec::local(args.nproc_per_node, args.command, log_dir)
    })
}

/// A single node needs no shared token, and is safer with one that nobody else knows; only what was
/// typed changes that.
pub fn token(file: Option<PathBuf>, nnodes: usize) -> TokenSource {
    let variable = |name| std::env::var_os(name).filter(|value| nnodes > 1 && !value.is_empty());
    if let Some(path) = file {
        TokenSource::File(path)
    } else if let Some(hex) = variable("LOCKSTEP_TOKEN") {
        TokenSource::Env(hex.to_string_lossy().into_owned())
    } else if let Some(path) = variable("LOCKSTEP_TOKEN_FILE") {
        TokenSource::File(path.into())
    } else {
        TokenSource::None
    }
}

fn default_log_dir() -> anyhow::Result<PathBuf> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let pid = std::process::id();
    Ok(PathBuf::from(format!("runs/launch-{now}-{pid}/logs")))
}

/// torchrun's words for a number, which Kubeflow passes on.
fn ranks_per_node(typed: &str) -> Result<usize, String> {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    match (typed, gpus()) {
        ("cpu", _) | ("auto", 0) => Ok(cores()),
        ("gpu", 0) => Err("there is no GPU here; say cpu or a number".to_string()),
        ("gpu" | "auto", gpus) => Ok(gpus),
        (number, _) => number.parse().map_err(|_| "not a number, nor cpu, gpu or auto".to_string()),
    }
}

/// The GPUs that this host, or its container, gives us.
fn gpus() -> usize {
    let is_gpu = |name: OsString| {
        let number = name.to_str().and_then(|name| name.strip_prefix("nvidia"));
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    };
    std::fs::read_dir("/dev").map_or(0, |entries| {
        let names = entries.flatten().map(|entry| entry.file_name());
        names.filter(|name| is_gpu(name.clone())).count()
    })
}
