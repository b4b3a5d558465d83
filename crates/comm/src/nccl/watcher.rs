//! Follows enqueued calls until the GPU has completed them. They stay on the board until then. If one does not complete
//! because a rank is dead, stuck or made another call, the world breaks with its name, and the communicator is aborted.
//!
//! The time of a call begins when the GPU reaches it: hosts may enqueue far ahead.
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
    /// Recorded before and after the call.
    pub events: [StreamEvent; 2],
}

/// A call without its events.
struct Followed {
    communicator: Arc<Communicator>,
    members: Arc<[usize]>,
    watch: Watch,
    progress: Arc<Progress>,
}

/// How far the GPU is.
#[derive(Default)]
struct Progress {
    has_begun: AtomicBool,
    is_complete: AtomicBool,
}

enum Job {
    Follow(Box<Followed>),
    /// Answered when all earlier calls are complete.
    Flush(Sender<()>),
}

type Asked = ([StreamEvent; 2], Arc<Progress>);

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
            start_thread("nccl-calls", move || follow_all(&followed)).expect(STARTS),
            start_thread("nccl-events", move || ask_all(&asked)).expect(STARTS),
        ];
        Watcher { queues: Some((jobs, events)), threads }
    }

    pub fn follow(&self, call: Enqueued) {
        let Enqueued { communicator, members, watch, events } = call;
        let progress = Arc::<Progress>::default();
        self.queues().1.send((events, progress.clone())).expect(LIVES);
        self.send(Job::Follow(Box::new(Followed { communicator, members, watch, progress })));
    }

    /// Waits until all calls are complete, or their communicators are being aborted.
    pub fn flush(&self) {
        let (flushed, answer) = channel();
        self.send(Job::Flush(flushed));
        answer.recv().expect("the thread answers every flush");
    }

    fn send(&self, job: Job) {
        self.queues().0.send(job).expect(LIVES);
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

const STARTS: &str = "a thread can be started";
const LIVES: &str = "the thread lives as long as the watcher";

/// The name has at most 15 characters.
fn start_thread(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(run)
}

/// Marks calls that the GPU has begun and completed.
fn ask_all(calls: &Receiver<Asked>) {
    for ([before, after], progress) in calls {
        let mut looks = 0;
        for (event, reached) in [(before, &progress.has_begun), (after, &progress.is_complete)] {
            while !event.is_complete() {
                std::thread::sleep(PAUSES[usize::from(looks > 50)]);
                looks += 1;
            }
            reached.store(true, Ordering::Release);
        }
    }
}

fn follow_all(jobs: &Receiver<Job>) {
    let mut aborted: Vec<Arc<Communicator>> = Vec::new();
    let mut threads = Vec::new();
    for job in jobs {
        match job {
            Job::Follow(mut call) => {
                if follow(&mut call)
                    || aborted.iter().any(|one| Arc::ptr_eq(one, &call.communicator))
                {
                    continue;
                }
                let communicator = call.communicator.clone();
                aborted.push(communicator.clone());
                // An abort releases the kernels at once, and then may wait for those of other communicators, which are
                // aborted next.
                match start_thread("nccl-abort", move || communicator.abort()) {
                    Ok(thread) => threads.push(thread),
                    Err(_) => call.communicator.abort(),
                }
            }
            // The caller waits for the answer.
            Job::Flush(flushed) => drop(flushed.send(())),
        }
    }
    for thread in threads {
        let _ = thread.join();
    }
}

/// Returns when the GPU has completed the call, or false when it never will.
fn follow(call: &mut Followed) -> bool {
    let Followed { communicator, members, watch, progress } = call;
    let (mut looks, mut has_begun) = (0, false);
    while !progress.is_complete.load(Ordering::Acquire) {
        if !has_begun && progress.has_begun.load(Ordering::Acquire) {
            has_begun = true;
            watch.restart();
        }
        let checked = match has_begun {
            true => watch.check_often(|| missing(members, watch)),
            false => watch.check_intact(),
        };
        if checked.is_err() {
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
pub(super) fn missing(members: &[usize], watch: &Watch) -> usize {
    let present = watch.board.ranks_in(watch.call.group, watch.call.sequence);
    let is_present = |rank: &usize| present.iter().any(|(there, _)| there == rank);
    let mut others = members.iter().filter(|rank| **rank != watch.rank);
    let absent = others.clone().find(|rank| !is_present(rank));
    absent.or_else(|| others.next()).copied().unwrap_or(watch.rank)
}
