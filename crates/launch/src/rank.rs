//! One rank as a child process. Dropping it kills the process and its descendants. A rank never outlives the thread
//! that started it.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use lockstep_comm::Identity;

use super::identity::{self, LOG_DIR, SLOT, VARIABLES};
use super::output::{self, LineFormat, RankLog};
use super::spec::{LaunchError, LaunchSpec};
use super::sys;

pub(super) struct RankProcess {
    child: Child,
    pub log: Arc<RankLog>,
}

impl RankProcess {
    /// Starts the command with the given identity. `done` is dropped when its output ends.
    pub fn start(
        spec: &LaunchSpec,
        identity: &Identity,
        slot: usize,
        done: Sender<()>,
    ) -> Result<RankProcess, LaunchError> {
        let rank = identity.rank;
        let log = RankLog::open(&spec.log_dir, rank, identity.generation)
            .map_err(|cause| LaunchError::Log { dir: spec.log_dir.clone(), cause })?;
        let log = Arc::new(log);
        let child = command(spec, identity, slot).spawn().map_err(|cause| LaunchError::Spawn {
            rank,
            program: spec.command[0].to_string_lossy().into_owned(),
            cause,
        })?;
        tracing::info!(rank, pid = child.id(), "started");
        // From here on an early return drops the process, which kills it.
        let mut process = RankProcess { child, log };
        process.forward_output(LineFormat::new(spec.output, rank), done).map_err(|cause| {
            LaunchError::System { action: "start a thread for a rank's output", cause }
        })?;
        Ok(process)
    }

    fn forward_output(&mut self, format: LineFormat, done: Sender<()>) -> io::Result<()> {
        match (self.child.stdout.take(), self.child.stderr.take()) {
            (Some(out), Some(err)) => output::forward(out, err, format, self.log.clone(), done),
            _ => unreachable!("both streams are pipes"),
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Signals the rank's process group.
    pub fn signal(&self, signal: i32) {
        sys::signal_group(self.pid(), signal);
    }
}

impl Drop for RankProcess {
    /// Reaps the rank only now, so that its process group id could not be reused before.
    fn drop(&mut self) {
        self.signal(libc::SIGKILL);
        // A process that hangs in the kernel is not waited for.
        let _ = self.child.try_wait();
    }
}

/// Variables that make NCCL write its warnings to a file of the rank.
fn nccl_log(logs: &Path, rank: usize) -> [(&'static str, PathBuf); 2] {
    let file = logs.join(format!("nccl-rank{rank}.log"));
    [("NCCL_DEBUG", "WARN".into()), ("NCCL_DEBUG_FILE", file)]
}

fn command(spec: &LaunchSpec, identity: &Identity, slot: usize) -> Command {
    let mut command = Command::new(&spec.command[0]);
    command.args(&spec.command[1..]);
    for name in VARIABLES {
        command.env_remove(name);
    }
    command.envs(identity::to_env(identity));
    let logs = std::path::absolute(&spec.log_dir).unwrap_or_else(|_| spec.log_dir.clone());
    // NCCL's own log, next to that of the rank.
    for (name, value) in nccl_log(&logs, identity.rank) {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
    command.env(LOG_DIR, logs);
    command.env(SLOT, slot.to_string());
    command.envs(spec.extra_env.iter().cloned());
    // A rank is in its own process group, so reading from the terminal would stop it.
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped());
    command.stderr(Stdio::piped());
    sys::prepare_rank(&mut command, identity.listener_fd);
    command
}
