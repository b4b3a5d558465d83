//! What to launch, and what may come of it. Values only; `supervise` acts on them.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use super::ending::Ending;
use super::output::Show;
use lockstep_comm::token::{self, TokenError, TokenSource};

const LONGEST_GRACE: Duration = Duration::from_secs(24 * 60 * 60);

/// This node's share of a job.
#[derive(Clone, Debug)]
pub struct LaunchSpec {
    /// The program and its arguments, the same for every rank.
    pub command: Vec<OsString>,
    pub nproc_per_node: usize,
    pub nnodes: usize,
    pub node_rank: usize,
    pub master_addr: String,
    /// 0: a free port on a single node, 29500 on many.
    pub master_port: u16,
    /// How often a failed job is started anew.
    pub max_restarts: u32,
    pub log_dir: PathBuf,
    pub show: Show,
    /// How long a rank may take to end after SIGTERM before it gets SIGKILL.
    pub grace: Duration,
    /// The same where the reason is that another rank has failed; zero sends SIGKILL at once.
    pub grace_after_failure: Duration,
    /// The token that all nodes share. On a single node none is better: each generation then gets
    /// a random one.
    pub token: TokenSource,
    pub bind: Option<IpAddr>,
    /// Further variables for every rank.
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
            show: Show::RankZero,
            grace: Duration::from_secs(5),
            grace_after_failure: Duration::from_secs(5),
            token: TokenSource::None,
            bind: None,
            extra_env: Vec::new(),
        }
    }

    /// Everything that is wrong with it, as far as can be seen without trying.
    pub fn mistakes(&self) -> Vec<String> {
        let mut mistakes = Vec::new();
        if self.command.is_empty() {
            mistakes.push("there is no command; put it after `--`".to_string());
        }
        if self.nproc_per_node == 0 || self.nnodes == 0 {
            mistakes.push(format!(
                "{} nodes with {} ranks each are no ranks at all; both count from 1",
                self.nnodes, self.nproc_per_node
            ));
        }
        if self.node_rank >= self.nnodes {
            mistakes.push(format!(
                "node rank {} is not below the {} nodes; node ranks count from 0",
                self.node_rank, self.nnodes
            ));
        }
        if self.nnodes.checked_mul(self.nproc_per_node).is_none() {
            mistakes.push("nodes times ranks per node is beyond counting".to_string());
        }
        if self.grace > LONGEST_GRACE {
            mistakes.push(format!(
                "a grace of {} s is more than a day; give less",
                self.grace.as_secs()
            ));
        }
        if self.nnodes > 1 && self.token == TokenSource::None {
            mistakes.push(format!(
                "{} nodes need a token that they share: LOCKSTEP_TOKEN or --token-file; {}",
                self.nnodes,
                token::HOW_TO_MAKE
            ));
        }
        mistakes
    }
}

/// What came of a launch. The exit code is that of the last generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub exit_code: i32,
    /// The last generation, counting from 0.
    pub generation: u32,
    /// Who failed first in the last generation.
    pub failure: Option<Failure>,
    /// The signal by which the launcher was told to end.
    pub interrupted: Option<i32>,
}

/// The first rank that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub rank: usize,
    pub generation: u32,
    pub ending: Ending,
    pub log: PathBuf,
    /// Its last lines of output.
    pub tail: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} failed first: it {}", self.rank, self.ending)?;
        if self.ending == Ending::Signal(libc::SIGKILL) {
            write!(f, ", as the kernel does when memory runs out")?;
        }
        write!(f, " (generation {})", self.generation)?;
        if self.tail.is_empty() {
            return write!(f, "; it printed nothing");
        }
        write!(f, "; {} ends with:", self.log.display())?;
        self.tail.iter().try_for_each(|line| write!(f, "\n  | {line}"))
    }
}

/// Why ranks could not be started or watched.
#[derive(Debug)]
pub enum LaunchError {
    Mistakes(Vec<String>),
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
        act: &'static str,
        cause: io::Error,
    },
    /// The launchers of several nodes do not come together.
    Node {
        what: String,
    },
}

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LaunchError::Mistakes(mistakes) => f.write_str(&mistakes.join("\n")),
            LaunchError::Token(error) => error.fmt(f),
            LaunchError::Address { host, .. } => write!(
                f,
                "cannot find the address of {host}; give another --master-addr, or --bind the IP to listen on"
            ),
            LaunchError::Listen { at, cause } if cause.kind() == io::ErrorKind::AddrInUse => {
                write!(
                    f,
                    "port {} is in use on {}; choose another --master-port (on one node leave it out and a free one is taken)",
                    at.port(),
                    at.ip()
                )
            }
            LaunchError::Listen { at, .. } => write!(f, "cannot listen on {at}"),
            LaunchError::Log { dir, .. } => {
                write!(f, "cannot write logs in {}; choose a --log-dir", dir.display())
            }
            LaunchError::Spawn { rank, program, .. } => {
                write!(f, "cannot start {program} as rank {rank}")
            }
            LaunchError::System { act, .. } => write!(f, "cannot {act}"),
            LaunchError::Node { what } => f.write_str(what),
        }
    }
}

impl std::error::Error for LaunchError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            LaunchError::Mistakes(_) | LaunchError::Node { .. } => None,
            LaunchError::Token(error) => error.source(),
            LaunchError::Address { cause, .. }
            | LaunchError::Listen { cause, .. }
            | LaunchError::Log { cause, .. }
            | LaunchError::Spawn { cause, .. }
            | LaunchError::System { cause, .. } => Some(cause),
        }
    }
}
