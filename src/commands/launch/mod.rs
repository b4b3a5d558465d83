//! `lockstep launch`: converts the arguments to a `LaunchSpec`.

mod selftest;

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lockstep_comm::{TokenSource, Transport};
use lockstep_launch::{LaunchSpec, OutputMode, identity, launch};

use crate::world;

/// Start ranks on this node, supervise them, and stop them together.
///
/// Every rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, GROUP_RANK,
/// MASTER_ADDR, MASTER_PORT, LOCKSTEP_TOKEN and LOCKSTEP_GENERATION in its environment. Rank 0 also
/// gets LOCKSTEP_LISTEN_FD, a socket that already listens on the master port. Standard input is
/// empty.
///
/// The output of each rank is written to a log file. The output of rank 0 is also shown; --tee shows
/// that of all ranks, line by line. When a rank fails, the launcher prints its last lines, stops the
/// other ranks, and exits with the rank's exit code (128 + the signal if it was killed).
///
/// Ranks and the processes in their process groups do not outlive the launcher. If the launcher is
/// killed with SIGKILL, its ranks die too, but not the processes that they started.
#[derive(clap::Args)]
pub struct Args {
    /// Ranks on this node: a number, cpu, gpu, or auto (GPUs if there are any, else cores)
    #[arg(long, default_value = "1", env = "PET_NPROC_PER_NODE", value_parser = ranks_per_node)]
    nproc_per_node: usize,
    /// Number of nodes; run one launcher on each
    #[arg(long, default_value_t = 1, env = "PET_NNODES")]
    nnodes: usize,
    /// Index of this node, from 0
    #[arg(long, default_value_t = 0, env = "PET_NODE_RANK")]
    node_rank: usize,
    /// Host of rank 0
    #[arg(long, default_value = "127.0.0.1", env = "PET_MASTER_ADDR")]
    master_addr: String,
    /// Port on which rank 0 listens; 0 means a free port on one node and 29500 on several
    #[arg(long, default_value_t = 0, env = "PET_MASTER_PORT")]
    master_port: u16,
    /// Maximum number of restarts after failures
    #[arg(long, default_value_t = 0, env = "PET_MAX_RESTARTS")]
    max_restarts: u32,
    /// Directory for the log files rank-N.log [default: runs/launch-TIME-PID/logs]
    #[arg(long)]
    log_dir: Option<PathBuf>,
    /// Show the output of all ranks, each line with its rank: `[3] line`
    #[arg(long)]
    tee: bool,
    /// Seconds between SIGTERM and SIGKILL
    #[arg(long, default_value_t = 5)]
    grace: u64,
    /// File with the shared token, 64 hex digits [default: LOCKSTEP_TOKEN_FILE or LOCKSTEP_TOKEN]
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// IP address for ranks to listen on [default: derived from --master-addr]
    #[arg(long)]
    bind: Option<IpAddr>,
    /// Encrypt all traffic between ranks, with keys derived from the token [default: LOCKSTEP_ENCRYPT]
    #[arg(long)]
    encrypt: bool,
    /// Check the hosts instead of running a command: versions, rendezvous, links, all-reduce, clocks and storage
    #[arg(long, conflicts_with = "command")]
    selftest: bool,
    /// With --selftest, print one JSON object instead of text
    #[arg(long, requires = "selftest")]
    json: bool,
    /// With --selftest, directory that contains run folders
    #[arg(long, default_value = "runs", requires = "selftest")]
    runs: PathBuf,
    /// With --selftest, MiB to write to that directory per host
    #[arg(long, default_value_t = 256, requires = "selftest")]
    storage_mib: usize,
    /// Command to run, after `--`
    #[arg(last = true, required_unless_present = "selftest")]
    command: Vec<OsString>,
}

pub fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    if args.selftest {
        if world::is_launched() {
            return selftest::rank(&args.runs, args.storage_mib, args.json);
        }
        args.command = selftest::command(&args.runs, args.storage_mib, args.json)?;
    }
    let outcome = launch(&spec(args)?)?;
    Ok(ExitCode::from(u8::try_from(outcome.exit_code).unwrap_or(1)))
}

fn spec(args: Args) -> anyhow::Result<LaunchSpec> {
    if args.nnodes > 1 && matches!(args.master_addr.as_str(), "127.0.0.1" | "localhost") {
        tracing::warn!(
            "--master-addr {} cannot be reached from other nodes; set it to the host of node 0",
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
        output: if args.tee { OutputMode::All } else { OutputMode::RankZero },
        grace: Duration::from_secs(args.grace),
        grace_after_failure: Duration::from_secs(args.grace),
        token: token(args.token_file, args.nnodes),
        bind: args.bind,
        transport: transport(args.encrypt)?,
        ..LaunchSpec::local(args.nproc_per_node, args.command, log_dir)
    })
}

/// How processes connect: as the environment says, and encrypted if --encrypt is given.
pub fn transport(encrypt: bool) -> anyhow::Result<Transport> {
    let from_env = identity::transport_from_process_env()?;
    Ok(Transport { encrypt: encrypt || from_env.encrypt, ..from_env })
}

/// The token from --token-file or, on several nodes, from the environment. A single node needs none: its launcher
/// creates a random one.
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

/// Parses torchrun's values, which Kubeflow passes on.
fn ranks_per_node(value: &str) -> Result<usize, String> {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    match (value, gpus()) {
        ("cpu", _) | ("auto", 0) => Ok(cores()),
        ("gpu", 0) => Err("this node has no GPU; use cpu or a number".to_string()),
        ("gpu" | "auto", gpus) => Ok(gpus),
        (number, _) => {
            number.parse().map_err(|_| "expected a number, cpu, gpu or auto".to_string())
        }
    }
}

/// Number of GPUs of this host or container.
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
