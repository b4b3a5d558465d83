//! Launching a job on this node: generation after generation, until one succeeds, restarts are used
//! up, or somebody says stop. Never knows what the ranks compute.

use std::path::Path;
use std::sync::mpsc;

use super::ending::{Ending, STOPPED};
use super::events::{Share, SignalWatch};
use super::generation::{self, Ended};
use super::meeting::{self, Meeting};
use super::output;
use super::spec::{LaunchError, LaunchSpec, Outcome};
use lockstep_comm::token;

/// Starts this node's ranks and stays with them to the end.
///
/// Ranks are bound to the calling thread: should it die, even by SIGKILL, they die with it. While it
/// runs, SIGINT, SIGTERM, SIGHUP and SIGQUIT to this thread's process end the ranks first.
pub fn launch(spec: &LaunchSpec) -> Result<Outcome, LaunchError> {
    let mistakes = spec.mistakes();
    if !mistakes.is_empty() {
        return Err(LaunchError::Mistakes(mistakes));
    }
    let shared_token = spec.token.load().map_err(LaunchError::Token)?;
    let (sender, events) = mpsc::channel();
    let _signals = SignalWatch::start(sender.clone())
        .map_err(|cause| LaunchError::System { act: "watch for signals", cause })?;

    let mut number = 0;
    loop {
        // On one node nobody else has to know the token, so a straggler of the last generation
        // cannot join this one.
        let token = match &shared_token {
            Some(token) => token.clone(),
            None => token::random()
                .map_err(|cause| LaunchError::System { act: "read /dev/urandom", cause })?,
        };
        let share = share(spec, number)?;
        let ended = generation::run(spec, share, token, (&sender, &events), &|_| {})?;
        if let Some(failure) = &ended.failure {
            output::say(&failure.to_string());
        }
        let again = ended.failure.is_some() && ended.interrupted.is_none() && !ended.hopeless();
        if !again || number == spec.max_restarts {
            return Ok(outcome(ended, number));
        }
        number += 1;
        output::say(&format!(
            "starting generation {number} (restart {number} of at most {})",
            spec.max_restarts
        ));
    }
}

/// This node's ranks: nodes have equally many, one after the other.
fn share(spec: &LaunchSpec, generation: u32) -> Result<Share, LaunchError> {
    let Meeting { port, listener } = meeting::arrange(spec)?;
    Ok(Share {
        generation,
        first_rank: spec.node_rank * spec.nproc_per_node,
        slots: (0..spec.nproc_per_node).collect(),
        size: spec.nnodes * spec.nproc_per_node,
        node: spec.node_rank,
        master_addr: spec.master_addr.clone(),
        master_port: port,
        listener,
    })
}

/// Starts this very program `n` times as local ranks, with the arguments it was given itself, and
/// shows rank 0's output. In the copies [`crate::identity::from_env`] finds their rank, so that they know
/// not to do the same.
pub fn respawn_self(
    n: usize,
    extra_env: &[(String, String)],
    log_dir: &Path,
) -> Result<Outcome, LaunchError> {
    let mut spec = this_program(n, log_dir)?;
    spec.extra_env = extra_env.to_vec();
    launch(&spec)
}

/// The spec that [`respawn_self`] launches, for who wants restarts or another view.
pub fn this_program(n: usize, log_dir: &Path) -> Result<LaunchSpec, LaunchError> {
    let program = std::env::current_exe()
        .map_err(|cause| LaunchError::System { act: "find this program's own file", cause })?;
    let mut command = vec![program.into_os_string()];
    command.extend(std::env::args_os().skip(1));
    Ok(LaunchSpec::local(n, command, log_dir.to_path_buf()))
}

fn outcome(ended: Ended, generation: u32) -> Outcome {
    let stopped = ended.orderly() && !ended.done();
    let exit_code = match (ended.interrupted, &ended.failure) {
        _ if stopped => STOPPED,
        (Some(signal), _) => Ending::Signal(signal).exit_code(),
        (None, Some(failure)) => failure.ending.exit_code(),
        (None, None) => 0,
    };
    Outcome { exit_code, generation, failure: ended.failure, interrupted: ended.interrupted }
}
