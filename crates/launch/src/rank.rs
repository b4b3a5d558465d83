//! One rank as a child process: started with its identity, its output in hand, and gone with all its
//! descendants when dropped. Never outlives the thread that started it.

use std::io;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use super::identity::{self, LOG_DIR, SLOT, VARIABLES};
use super::output::{self, RankLog, View};
use super::spec::{LaunchError, LaunchSpec};
use super::sys;
use lockstep_comm::Identity;

pub(super) struct RankProcess {
    child: Child,
    pub log: Arc<RankLog>,
}

impl RankProcess {
    /// Starts the command as the rank that `identity` says. `done` is dropped when its output ends.
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
        // From here on an early return drops the process, which ends it.
        let mut process = RankProcess { child, log };
        let view = View::of(spec.show, rank);
        process.pump_output(view, done).map_err(|cause| LaunchError::System {
            act: "start a thread for a rank's output",
            cause,
        })?;
        Ok(process)
    }

    fn pump_output(&mut self, view: View, done: Sender<()>) -> io::Result<()> {
        match (self.child.stdout.take(), self.child.stderr.take()) {
            (Some(out), Some(err)) => output::pump(out, err, view, self.log.clone(), done),
            _ => unreachable!("both streams were asked to be pipes"),
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Signals the rank and those it started.
    pub fn signal(&self, signal: i32) {
        sys::signal_group(self.pid(), signal);
    }
}

impl Drop for RankProcess {
    /// The rank is reaped only now, so its group's number was never anybody else's.
    fn drop(&mut self) {
        self.signal(libc::SIGKILL);
        // One that hangs in the kernel dies when it comes back; waiting for that helps nobody.
        let _ = self.child.try_wait();
    }
}

fn command(spec: &LaunchSpec, identity: &Identity, slot: usize) -> Command {
    let mut command = Command::new(&spec.command[0]);
    command.args(&spec.command[1..]);
    for name in VARIABLES {
        command.env_remove(name);
    }
    command.envs(identity::to_env(identity));
    // Where a rank may leave what belongs beside its log.
    let logs = std::path::absolute(&spec.log_dir).unwrap_or_else(|_| spec.log_dir.clone());
    command.env(LOG_DIR, logs);
    command.env(SLOT, slot.to_string());
    command.envs(spec.extra_env.iter().cloned());
    // In a group of its own a rank could not read from the terminal: it would be stopped.
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped());
    command.stderr(Stdio::piped());
    sys::make_rank(&mut command, identity.listener_fd);
    command
}
