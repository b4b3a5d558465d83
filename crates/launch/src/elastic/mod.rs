//! Elastic jobs: the launchers of several nodes form one job that continues while enough of them are available. See
//! README.md in this directory. Does not know what ranks compute: [`Job`] tells it how many ranks can work together and
//! how far they have come.

mod agent;
mod connect;
mod connection;
mod coordinator;
mod messages;
mod server;

use std::time::Duration;

use lockstep_comm::token;
use lockstep_comm::wire::{ENCRYPTED, Expect, PROTOCOL, Secret};

use crate::{LaunchError, LaunchSpec};

pub use connect::run_agent;
pub use server::run_coordinator;

/// The description of a job that its coordinator needs.
pub struct Job {
    /// Number of nodes expected at the start.
    pub nodes: usize,
    /// Number of ranks when all nodes are available.
    pub ranks: usize,
    pub policy: RestartPolicy,
    /// How many of the given number of ranks can work together; `None` if too few.
    pub fit: Box<dyn Fn(usize) -> Option<usize> + Send>,
    /// Allocates the number of the next generation, larger than all before.
    pub next_generation: Box<dyn FnMut() -> Result<u32, String> + Send>,
    /// How far the job has come: a number that grows, such as the step of the newest checkpoint.
    pub progress: Box<dyn Fn() -> u64 + Send>,
}

/// Limits on restarts and waiting times.
#[derive(Clone, Copy, Debug)]
pub struct RestartPolicy {
    /// Maximum number of restarts without progress.
    pub max_restarts: u32,
    /// How long to wait for all nodes at the start before continuing with fewer.
    pub start_timeout: Duration,
    /// How long to wait for a lost node before continuing without it.
    pub loss_timeout: Duration,
    /// How long to wait for the minimum number of ranks before the job fails.
    pub give_up: Duration,
}

impl Default for RestartPolicy {
    fn default() -> RestartPolicy {
        RestartPolicy {
            max_restarts: 3,
            start_timeout: Duration::from_secs(60),
            loss_timeout: Duration::from_secs(10),
            give_up: Duration::from_secs(600),
        }
    }
}

/// The secret shared by launchers. It differs from that of the ranks, so that neither is accepted as the other.
fn launcher_secret(token: Option<&str>) -> Result<Secret, LaunchError> {
    let Some(hex) = token else {
        let error = format!("several nodes need a shared token; {}", token::HOW_TO_MAKE);
        return Err(LaunchError::Rendezvous(error));
    };
    let secret = Secret::from_hex(hex)
        .map_err(|error| LaunchError::Rendezvous(format!("invalid token: {error}")))?;
    Ok(secret.derive(b"launchers"))
}

/// The coordinator's side of the handshake. Launchers outlive generations, so the generation is always 0 here; a node
/// checks the number of each generation that it is asked to start.
fn expect(spec: &LaunchSpec) -> Expect {
    let version = if spec.transport.encrypt { PROTOCOL | ENCRYPTED } else { PROTOCOL };
    Expect { version, generation: 0, config: spec.run, rank: 0 }
}
