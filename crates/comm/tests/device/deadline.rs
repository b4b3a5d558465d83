//! Ends the process if a test of NCCL hangs, and says what its ranks were doing: kernels that wait for each other end in no
//! other way.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The limit of tests that take a few seconds.
pub const LIMIT: Duration = Duration::from_secs(32);

/// The deadline of a test, until it is dropped.
pub struct Deadline {
    steps: Arc<Mutex<BTreeMap<usize, String>>>,
    _running: Sender<()>,
}

impl Deadline {
    /// `limit` is much longer than the test takes on an idle GPU.
    pub fn start(test: &'static str, limit: Duration) -> Deadline {
        let steps: Arc<Mutex<BTreeMap<usize, String>>> = Arc::default();
        let (running, ended) = channel::<()>();
        let of_ranks = steps.clone();
        std::thread::spawn(move || {
            if ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                let mut text = format!("{test} hangs for {} s:\n", limit.as_secs());
                for (rank, step) in &*of_ranks.lock().unwrap() {
                    text += &format!("  rank {rank}: {step}\n");
                }
                // Not with `eprint`, whose output a test captures.
                let _ = std::io::stderr().write_all(text.as_bytes());
                // SAFETY: ends the process. Without `exit`, in which the driver would wait for the kernels.
                unsafe { libc::_exit(1) };
            }
        });
        Deadline { steps, _running: running }
    }

    /// Notes what a rank begins.
    pub fn step(&self, rank: usize, what: impl std::fmt::Display) {
        self.steps.lock().unwrap().insert(rank, what.to_string());
    }
}
