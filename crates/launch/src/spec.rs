//! Description of a launch and its possible outcomes. Values only; `supervise` acts on them.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use lockstep_comm::Transport;
use lockstep_comm::token::{self, TokenError, TokenSource};

use super::exit::Exit;
use super::output::OutputMode;

const MAX_GRACE: Duration = Duration::from_secs(24 * 60 * 60);

/// Launch of one node.
#[derive(Clone, Debug)]
pub struct LaunchSpec {
    /// The program and its arguments, the same for every rank.
    pub command: Vec<OsString>,
    pub nproc_per_node: usize,
    pub nnodes: usize,
    pub node_rank: usize,
    pub master_addr: String,
    /// 0 means a free port on a single node and 29500 on several.
    pub master_port: u16,
    /// Maximum number of restarts after a failure.
    pub max_restarts: u32,
    pub log_dir: PathBuf,
    pub output: OutputMode,
    /// Time between SIGTERM and SIGKILL.
    pub grace: Duration,
    /// Time between SIGTERM and SIGKILL after another rank has failed. Zero sends SIGKILL at once.
    pub grace_after_failure: Duration,
    /// Time that the other ranks have after a failure to report it and exit by themselves, before SIGTERM.
    pub report_window: Duration,
    /// After this time in which all ranks of this node were stopped (SIGSTOP), they have failed.
    pub stopped_limit: Duration,
    /// The token shared by all nodes. Not needed on a single node: each generation then gets a random one.
    pub token: TokenSource,
    pub bind: Option<IpAddr>,
    pub transport: Transport,
    /// Digest of the run's configuration. The launchers of an elastic job reject those of other runs.
    pub run: [u8; 32],
    /// Additional environment variables for every rank.
    pub extra_env: Vec<(String, String)>,
}

impl LaunchSpec {
    /// `nproc` ranks on this host, with the defaults of `lockstep launch`.
    pub fn local(nproc: usize, command: Vec<OsString>, log_dir: PathBuf) -> LaunchSpec {
        LaunchSpec {
            command,
            nproc_per_node: nproc,
            nnodes: 1,
            node_rank: 0,
            master_addr: "127.0.0.1".to_string(),
            master_port: 0,
            max_restarts: 0,
            log_dir,
            output: OutputMode::RankZero,
            grace: Duration::from_secs(5),
            grace_after_failure: Duration::from_secs(5),
            report_window: Duration::from_secs(2),
            stopped_limit: Duration::from_secs(10),
            token: TokenSource::None,
            bind: None,
            transport: Transport::default(),
            run: [0; 32],
            extra_env: Vec::new(),
        }
    }

    /// Checks the spec and loads the shared token.
    pub(crate) fn check(&self) -> Result<Option<String>, LaunchError> {
        let errors = self.errors();
        if !errors.is_empty() {
            return Err(LaunchError::Invalid(errors));
        }
        self.token.load().map_err(LaunchError::Token)
    }

    fn errors(&self) -> Vec<String> {
        let mut errors = Vec::new();
        if self.command.is_empty() {
            errors.push("no command given; put it after `--`".to_string());
        }
        for (option, value) in [("nodes", self.nnodes), ("ranks per node", self.nproc_per_node)] {
            if value == 0 {
                errors.push(format!("the number of {option} must be at least 1 (got 0)"));
            }
        }
        if self.node_rank >= self.nnodes {
            errors.push(format!(
                "node rank {} is out of range: there are {} nodes, counted from 0",
                self.node_rank, self.nnodes
            ));
        }
        if self.nnodes.checked_mul(self.nproc_per_node).is_none() {
            errors.push(format!(
                "{} nodes with {} ranks each are too many ranks",
                self.nnodes, self.nproc_per_node
            ));
        }
        if self.grace > MAX_GRACE {
            errors.push(format!(
                "the grace period must be at most {} s (got {} s)",
                MAX_GRACE.as_secs(),
                self.grace.as_secs()
            ));
        }
        if self.nnodes > 1 && self.token == TokenSource::None {
            errors.push(format!(
                "{} nodes need a shared token: set LOCKSTEP_TOKEN or --token-file; {}",
                self.nnodes,
                token::HOW_TO_MAKE
            ));
        }
        errors
    }
}

/// The outcome of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Exit code of the last generation.
    pub exit_code: i32,
    /// Index of the last generation.
    pub generation: u32,
    /// First failure of the last generation.
    pub failure: Option<Failure>,
    /// The signal that stopped the launcher.
    pub interrupted: Option<i32>,
}

/// The first rank that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub rank: usize,
    pub generation: u32,
    pub exit: Exit,
    pub log: PathBuf,
    /// The last lines of its output.
    pub tail: Vec<String>,
    /// Processes that the kernel killed during the generation because memory ran out; `None` if unknown.
    pub oom_kills: Option<u64>,
    /// The last of them is on the terminal, because rank 0 has the same error.
    pub shown: bool,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} failed first: it {}", self.rank, self.exit)?;
        match (self.exit, self.oom_kills) {
            (Exit::Signal(libc::SIGKILL), None) => {
                write!(f, ", possibly by the kernel because memory ran out")?;
            }
            (Exit::Signal(libc::SIGKILL), Some(1..)) => {
                write!(
                    f,
                    ", probably by the kernel, which killed processes because memory ran out"
                )?;
            }
            _ => {}
        }
        write!(f, " (generation {})", self.generation)?;
        if self.shown {
            return write!(f, "; its output is in {}", self.log.display());
        }
        if self.tail.is_empty() {
            return write!(f, "; it printed no output");
        }
        write!(f, "; {} ends with:", self.log.display())?;
        self.tail.iter().try_for_each(|line| write!(f, "\n  | {line}"))
    }
}

/// Why ranks could not be started or supervised.
pub enum LaunchError {
    /// Errors in the spec.
    Invalid(Vec<String>),
    Token(TokenError),
    Address {
        host: String,
        cause: io::Error,
    },
    Listen {
        at: SocketAddr,
        cause: io::Error,
    },
    Log {
        dir: PathBuf,
        cause: io::Error,
    },
    Spawn {
        rank: usize,
        program: String,
        cause: io::Error,
    },
    System {
        action: &'static str,
        cause: io::Error,
    },
    /// The launchers of several nodes cannot form a job.
    Rendezvous(String),
}

/// The text of `Display`, which `?` in `main` and `unwrap` then print.
impl fmt::Debug for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LaunchError::Invalid(errors) => f.write_str(&errors.join("\n")),
            LaunchError::Token(error) => error.fmt(f),
            LaunchError::Address { host, .. } => write!(
                f,
                "cannot resolve {host}; set --master-addr to another name, or --bind to the IP address to listen on"
            ),
            LaunchError::Listen { at, cause } if cause.kind() == io::ErrorKind::AddrInUse => {
                write!(
                    f,
                    "port {} is in use on {}; choose another --master-port (on one node, omit it to use a free port)",
                    at.port(),
                    at.ip()
                )
            }
            LaunchError::Listen { at, .. } => write!(f, "cannot listen on {at}"),
            LaunchError::Log { dir, .. } => {
                write!(
                    f,
                    "cannot write logs to {}; set --log-dir to a writable directory",
                    dir.display()
                )
            }
            LaunchError::Spawn { rank, program, .. } => {
                write!(f, "cannot start {program} as rank {rank}")
            }
            LaunchError::System { action, .. } => write!(f, "cannot {action}"),
            LaunchError::Rendezvous(error) => f.write_str(error),
        }
    }
}

impl std::error::Error for LaunchError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            LaunchError::Invalid(_) | LaunchError::Rendezvous(_) => None,
            LaunchError::Token(error) => error.source(),
            LaunchError::Address { cause, .. }
            | LaunchError::Listen { cause, .. }
            | LaunchError::Log { cause, .. }
            | LaunchError::Spawn { cause, .. }
            | LaunchError::System { cause, .. } => Some(cause),
        }
    }
}
