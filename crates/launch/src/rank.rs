//! One rank as a child process. Dropping it kills the process and its descendants. A rank never outlives the thread
//! that started it.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
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

/// Variables that make NCCL write its warnings to a file of the rank. Each generation has its own, because NCCL empties the
/// file when it starts.
fn nccl_log(logs: &Path, identity: &Identity) -> [(&'static str, OsString); 2] {
    let Identity { rank, generation, .. } = identity;
    let file = logs.join(format!("nccl-rank-{rank}-generation-{generation}.log"));
    // NCCL replaces %h and %p.
    let bytes = file.into_os_string().into_vec();
    let escaped = bytes.split(|byte| *byte == b'%').collect::<Vec<_>>().join(&b"%%"[..]);
    [("NCCL_DEBUG", "WARN".into()), ("NCCL_DEBUG_FILE", OsString::from_vec(escaped))]
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
    for (name, value) in nccl_log(&logs, identity) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_of_nccl_are_kept_by_rank_and_generation() {
        let identity = Identity { generation: 2, ..Identity::local(3, 8, 1) };
        let [(_, level), (_, file)] = nccl_log(Path::new("/runs/50%/logs"), &identity);
        assert_eq!(level, "WARN");
        assert_eq!(file, "/runs/50%%/logs/nccl-rank-3-generation-2.log");
    }
}
