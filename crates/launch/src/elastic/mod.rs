//! Launchers of several nodes as one job that goes on while enough of them are there. See the README beside this
//! file. Knows nothing of what ranks compute: how many can work, and how far they have come, it is told.

mod captain;
mod follow;
mod lead;
mod link;
mod node;
mod words;

use std::time::Duration;

use crate::{Ending, LaunchError, Outcome, output};
use lockstep_comm::token;
use lockstep_comm::wire::{Expect, PROTOCOL, Secret};
use node::{Memory, Parted};

pub use follow::follow;
pub use lead::lead;

/// What is to be known of a job to lead it.
pub struct Job {
    rules: lead::JobRules,
    next: Box<dyn FnMut() -> Result<u32, String> + Send>,
    progress: Box<dyn Fn() -> u64 + Send>,
}

/// What may be set for a job. Every field has a default that is right for most.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Restarts without any progress in between.
    pub max_restarts: u32,
    /// How long to wait at the start until all nodes are there, before going on with enough of them.
    pub at_start: Duration,
    /// How long to wait for a lost node before going on without it.
    pub after_loss: Duration,
    /// How long to wait for as many nodes as are needed at least.
    pub give_up: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            max_restarts: 3,
            at_start: Duration::from_secs(60),
            after_loss: Duration::from_secs(10),
            give_up: Duration::from_secs(600),
        }
    }
}

impl Job {
    /// A job of `ranks` ranks on `nodes` nodes when all are there.
    ///
    /// `fit` says how many of so many ranks can work, or that it is not enough to go on; `next` the number of the
    /// next generation, above that of any before; `progress` how far the job has come, by a number that grows.
    pub fn new(
        nodes: usize,
        ranks: usize,
        patience: Patience,
        fit: impl Fn(usize) -> Option<usize> + Send + 'static,
        next: impl FnMut() -> Result<u32, String> + Send + 'static,
        progress: impl Fn() -> u64 + Send + 'static,
    ) -> Job {
        let Patience { max_restarts, at_start, after_loss, give_up } = patience;
        let fit = Box::new(fit);
        let rules =
            lead::JobRules { nodes, ranks, fit, max_restarts, at_start, after_loss, give_up };
        Job { rules, next: Box::new(next), progress: Box::new(progress) }
    }
}

/// The secret of launchers: not a rank's, so that neither is taken for the other.
fn job_secret(shared: Option<&str>) -> Result<Secret, LaunchError> {
    let unusable = |what: String| LaunchError::Node { what };
    let Some(hex) = shared else {
        return Err(unusable(format!(
            "nodes need a token that they share; {}",
            token::HOW_TO_MAKE
        )));
    };
    let secret = Secret::from_hex(hex).map_err(|e| unusable(format!("the token: {e}")))?;
    Ok(secret.derive(b"launchers"))
}

/// What the first node's launcher is to the others. They outlive generations, so they have none.
fn expect() -> Expect {
    Expect { version: PROTOCOL, generation: 0, config: [0; 32], rank: 0 }
}

fn node_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_string()
}

fn outcome(parted: Parted, memory: Memory) -> Outcome {
    let exit_code = match parted {
        Parted::Bye { code, text } => {
            if !text.is_empty() {
                output::say(&text);
            }
            code
        }
        Parted::Signalled(signal) => Ending::Signal(signal).exit_code(),
        Parted::Lost => memory.interrupted.map_or(1, |signal| Ending::Signal(signal).exit_code()),
    };
    let Memory { generation, failure, interrupted } = memory;
    let failure = failure.filter(|_| exit_code != 0);
    Outcome { exit_code, generation, failure, interrupted }
}
