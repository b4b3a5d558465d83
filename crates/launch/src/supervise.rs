//! The launcher of one node: runs generation after generation until one succeeds, no restarts are left, or a signal
//! stops it. Does not know what the ranks compute.

use std::path::Path;

use lockstep_comm::token;

use super::events::{Assignment, Events, SignalWatch};
use super::exit::{EXIT_STOPPED, Exit};
use super::generation::{self, GenerationResult};
use super::output;
use super::rendezvous::{self, Rendezvous};
use super::spec::{LaunchError, LaunchSpec, Outcome};

/// Starts this node's ranks and supervises them until the job ends.
///
/// Ranks are tied to the calling thread: if it dies, even by SIGKILL, they die with it. While it runs, SIGINT, SIGTERM,
/// SIGHUP and SIGQUIT to this process stop the ranks first.
pub fn launch(spec: &LaunchSpec) -> Result<Outcome, LaunchError> {
    let shared_token = spec.check()?;
    let events = Events::new();
    let _signals = SignalWatch::start(events.sender.clone())
        .map_err(|cause| LaunchError::System { action: "watch for signals", cause })?;

    let mut number = 0;
    loop {
        let token = generation_token(shared_token.as_deref())?;
        let result = generation::run(spec, assignment(spec, number)?, token, &events, &|_| {})?;
        if let Some(failure) = &result.failure {
            output::report(&failure.to_string());
        }
        let retry = result.failure.is_some()
            && result.interrupted.is_none()
            && !result.is_permanent_failure();
        if !retry || number == spec.max_restarts {
            return Ok(outcome(result, number));
        }
        number += 1;
        output::report(&format!(
            "starting generation {number} (restart {number} of at most {})",
            spec.max_restarts
        ));
    }
}

/// The token of one generation. On a single node it is random, so that a leftover rank of the last generation cannot
/// join this one.
pub(crate) fn generation_token(shared: Option<&str>) -> Result<String, LaunchError> {
    match shared {
        Some(token) => Ok(token.to_string()),
        None => token::random()
            .map_err(|cause| LaunchError::System { action: "read /dev/urandom", cause }),
    }
}

/// This node's ranks: all nodes have the same number, in order of the nodes.
fn assignment(spec: &LaunchSpec, generation: u32) -> Result<Assignment, LaunchError> {
    let Rendezvous { port, listener } = rendezvous::prepare(spec)?;
    Ok(Assignment {
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

/// A spec that starts this program `n` times as local ranks, with its own arguments. In the copies,
/// [`crate::identity::from_env`] finds their rank.
pub fn this_program(n: usize, log_dir: &Path) -> Result<LaunchSpec, LaunchError> {
    let program = std::env::current_exe()
        .map_err(|cause| LaunchError::System { action: "find this program's executable", cause })?;
    let mut command = vec![program.into_os_string()];
    command.extend(std::env::args_os().skip(1));
    Ok(LaunchSpec::local(n, command, log_dir.to_path_buf()))
}

fn outcome(result: GenerationResult, generation: u32) -> Outcome {
    let stopped = result.is_graceful() && !result.is_success();
    let exit_code = match (result.interrupted, &result.failure) {
        _ if stopped => EXIT_STOPPED,
        (Some(signal), _) => Exit::Signal(signal).code(),
        (None, Some(failure)) => failure.exit.code(),
        (None, None) => 0,
    };
    Outcome { exit_code, generation, failure: result.failure, interrupted: result.interrupted }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn survivors_may_report_a_failure_before_they_are_stopped() {
        let dir = std::env::temp_dir().join(format!("lockstep-survivors-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let script = r#"
            cd "$0"
            if [ $RANK = 1 ]; then
                echo $$ > pid.new; mv pid.new pid
                until [ -e ready ]; do sleep 0.05; done
                exit 6
            fi
            trap 'touch terminated' TERM
            until [ -e pid ]; do sleep 0.05; done
            touch ready
            until grep -q '^State:.*Z' /proc/$(cat pid)/status; do sleep 0.05; done
            echo "rank 1 is gone" > report
            exit 1"#;
        let command = ["sh".into(), "-c".into(), script.into(), dir.clone().into_os_string()];
        let mut spec = LaunchSpec::local(2, command.to_vec(), dir.join("logs"));
        spec.output = crate::OutputMode::None;
        // Long enough on any machine; rank 0 ends it.
        spec.report_window = Duration::from_secs(600);
        let outcome = launch(&spec).unwrap();
        assert_eq!((outcome.exit_code, outcome.failure.unwrap().rank), (6, 1));
        assert!(dir.join("report").exists() && !dir.join("terminated").exists());
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn ranks_that_are_all_stopped_have_failed() {
        let dir = std::env::temp_dir().join(format!("lockstep-stopped-{}", std::process::id()));
        let command = ["sh", "-c", "kill -STOP $$"].map(Into::into);
        let mut spec = LaunchSpec::local(2, command.to_vec(), dir.join("logs"));
        spec.output = crate::OutputMode::None;
        (spec.stopped_limit, spec.grace_after_failure) = (Duration::from_secs(1), Duration::ZERO);
        let outcome = launch(&spec).unwrap();
        assert_eq!((outcome.exit_code, outcome.failure.unwrap().rank), (137, 0));
        std::fs::remove_dir_all(dir).unwrap();
    }
}
