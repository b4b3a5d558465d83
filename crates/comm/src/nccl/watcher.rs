//! Follows enqueued calls until the GPU has completed them. They stay on the board until then. If one does not complete
//! because a rank is dead, stuck or made another call, the world breaks with its name, and the communicator is aborted.
//!
//! Two threads: one asks the GPU, the other looks at the board and the clock and makes no call of CUDA. A thread that frees
//! memory may hold the driver until all kernels are complete; then only an abort releases it, so whoever aborts must not
//! need the driver before.

use super::api::{IN_PROGRESS, SUCCESS};
use super::communicator::Communicator;
use crate::health::watch::Watch;
use lockstep_cuda::StreamEvent;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// A call without its event.
struct Followed {
    communicator: Arc<Communicator>,
    members: Arc<[usize]>,
    watch: Watch,
    is_complete: Arc<AtomicBool>,
}

enum Job {
    Follow(Box<Followed>),
    /// Answered when all earlier calls are complete.
    Flush(Sender<()>),
}

type Asked = (StreamEvent, Arc<AtomicBool>);

pub(super) struct Watcher {
    /// None while it is dropped.
    queues: Option<(Sender<Job>, Sender<Asked>)>,
    threads: Vec<JoinHandle<()>>,
}

impl Watcher {
    /// Starts the threads.
    pub fn start() -> Watcher {
        let (jobs, followed) = channel();
        let (events, asked) = channel();
        let threads = vec![
            start_thread("lockstep-nccl", move || follow_all(&followed)),
            start_thread("lockstep-nccl-events", move || ask_all(&asked)),
        ];
        Watcher { queues: Some((jobs, events)), threads }
    }

    pub fn follow(&self, call: Enqueued) {
        let Enqueued { communicator, members, watch, event } = call;
        let is_complete = Arc::new(AtomicBool::new(false));
        let (_, events) = self.queues();
        // If the thread panicked, the call fails at its deadline.
        let _ = events.send((event, is_complete.clone()));
        self.send(Job::Follow(Box::new(Followed { communicator, members, watch, is_complete })));
    }

    /// Waits until all calls are complete or aborted.
    pub fn flush(&self) {
        let (flushed, answer) = channel();
        self.send(Job::Flush(flushed));
        answer.recv().expect("the thread answers every flush");
    }

    fn send(&self, job: Job) {
        self.queues().0.send(job).expect("the thread lives as long as the watcher");
    }

    fn queues(&self) -> &(Sender<Job>, Sender<Asked>) {
        self.queues.as_ref().expect("not dropped yet")
    }
}

/// Waits until all calls are complete or aborted.
impl Drop for Watcher {
    fn drop(&mut self) {
        drop(self.queues.take());
        for thread in self.threads.drain(..) {
            // A panic of the thread was printed.
            let _ = thread.join();
        }
    }
}

fn start_thread(name: &str, run: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    let builder = std::thread::Builder::new().name(name.into());
    builder.spawn(run).expect("a thread can be started")
}

/// Marks calls whose event the GPU has reached.
fn ask_all(events: &Receiver<Asked>) {
    for (event, is_complete) in events {
        let mut looks = 0;
        while !event.is_complete() {
            std::thread::sleep(PAUSES[usize::from(looks > 50)]);
            looks += 1;
        }
        is_complete.store(true, Ordering::Release);
    }
}

fn follow_all(jobs: &Receiver<Job>) {
    let mut aborts = Vec::new();
    for job in jobs {
        match job {
            Job::Follow(call) => {
                if !follow(&call) {
                    // Releases the kernels at once, and then may wait for kernels of other communicators, which are
                    // aborted next.
                    let abort = move || call.communicator.abort();
                    aborts.push(start_thread("lockstep-nccl-abort", abort));
                }
            }
            // The caller waits for the answer.
            Job::Flush(flushed) => drop(flushed.send(())),
        }
    }
    for abort in aborts {
        let _ = abort.join();
    }
}

/// Returns when the GPU has completed the call, or false when it never will.
fn follow(call: &Followed) -> bool {
    let Followed { communicator, members, watch, is_complete } = call;
    let mut looks = 0;
    while !is_complete.load(Ordering::Acquire) {
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
