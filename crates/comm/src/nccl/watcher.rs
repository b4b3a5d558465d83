//! Follows enqueued calls until the GPU has completed them. They stay on the board until then. If one does not complete
//! because a rank is dead, stuck or made another call, the world breaks with its name, and the communicator is aborted.

use super::api::{IN_PROGRESS, SUCCESS};
use super::communicator::Communicator;
use crate::health::watch::Watch;
use lockstep_cuda::StreamEvent;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Pauses between two looks at a call: short at first, because most calls take microseconds.
const PAUSES: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(5)];

/// An enqueued call.
pub(super) struct Enqueued {
    pub communicator: Arc<Communicator>,
    /// World ranks that take part.
    pub members: Arc<[usize]>,
    pub watch: Watch,
    /// Recorded after the call.
    pub event: StreamEvent,
}

enum Job {
    Follow(Box<Enqueued>),
    /// Answered when all earlier calls are complete.
    Flush(Sender<()>),
}

pub(super) struct Watcher {
    /// None while it is dropped.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Starts the thread.
    pub fn start() -> Watcher {
        let (jobs, enqueued) = channel();
        let thread = std::thread::Builder::new()
            .name("lockstep-nccl".into())
            .spawn(move || follow_all(&enqueued))
            .expect("a thread can be started");
        Watcher { jobs: Some(jobs), thread: Some(thread) }
    }

    pub fn follow(&self, call: Enqueued) {
        self.send(Job::Follow(Box::new(call)));
    }

    /// Waits until all calls are complete or aborted.
    pub fn flush(&self) {
        let (flushed, answer) = channel();
        self.send(Job::Flush(flushed));
        answer.recv().expect("the thread answers every flush");
    }

    fn send(&self, job: Job) {
        let jobs = self.jobs.as_ref().expect("not dropped yet");
        jobs.send(job).expect("the thread lives as long as the watcher");
    }
}

/// Waits until all calls are complete or aborted.
impl Drop for Watcher {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed.
            let _ = thread.join();
        }
    }
}

fn follow_all(jobs: &Receiver<Job>) {
    for job in jobs {
        match job {
            Job::Follow(call) => {
                if !follow(&call) {
                    call.communicator.abort();
                }
            }
            // The caller waits for the answer.
            Job::Flush(flushed) => drop(flushed.send(())),
        }
    }
}

/// Returns when the GPU has completed the call, or false when it never will.
fn follow(Enqueued { communicator, members, watch, event }: &Enqueued) -> bool {
    let mut looks = 0;
    while !event.is_complete() {
        if watch.check(missing(members, watch)).is_err() {
            return false;
        }
        let status = communicator.status();
        if status != SUCCESS && status != IN_PROGRESS {
            // Raises the failure that all ranks report.
            drop(communicator.failed(watch, status));
            return false;
        }
        std::thread::sleep(PAUSES[usize::from(looks > 50)]);
        looks += 1;
    }
    true
}

/// A member that is not in the call, as far as the board shows; otherwise any other.
fn missing(members: &[usize], watch: &Watch) -> usize {
    let present = watch.board.ranks_in(watch.call.group, watch.call.sequence);
    let is_present = |rank: &usize| present.iter().any(|(there, _)| there == rank);
    let mut others = members.iter().filter(|rank| **rank != watch.rank);
    let absent = others.clone().find(|rank| !is_present(rank));
    absent.or_else(|| others.next()).copied().unwrap_or(watch.rank)
}
