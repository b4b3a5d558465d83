//! Ends the process if a test of NCCL hangs, and says what its ranks were doing: kernels that wait for each other end in no
//! other way.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The limit of tests whose steps take less than a few seconds.
pub const LIMIT: Duration = Duration::from_secs(32);

/// The deadline of the present step of a test, until it is dropped.
pub struct Deadline {
    steps: Arc<Mutex<BTreeMap<usize, String>>>,
    begins: Sender<()>,
}

impl Deadline {
    /// `limit` is much longer than a step takes on an idle GPU.
    pub fn start(test: &'static str, limit: Duration) -> Deadline {
        let steps: Arc<Mutex<BTreeMap<usize, String>>> = Arc::default();
        let (begins, begun) = channel::<()>();
        let of_ranks = steps.clone();
        std::thread::spawn(move || {
            let ended = loop {
                if let Err(end) = begun.recv_timeout(limit) {
                    break end;
                }
            };
            if ended == RecvTimeoutError::Timeout {
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
        Deadline { steps, begins }
    }

    /// Notes what a rank begins.
    pub fn step(&self, rank: usize, what: impl std::fmt::Display) {
        self.steps.lock().unwrap().insert(rank, what.to_string());
        let _ = self.begins.send(());
    }
}
