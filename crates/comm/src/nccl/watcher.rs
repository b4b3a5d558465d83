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

/// An enqueued call, and the event behind it.
type Enqueued = (Watch, StreamEvent);

pub(super) struct Watcher {
    /// None while it is dropped.
    calls: Option<Sender<Enqueued>>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Starts the thread; it ends with the group. `members` are world ranks.
    pub fn start(communicator: Arc<Communicator>, members: Vec<usize>) -> Watcher {
        let (calls, enqueued) = channel();
        let thread = std::thread::Builder::new()
            .name("lockstep-nccl".into())
            .spawn(move || follow_all(&communicator, &members, &enqueued))
            .expect("a thread can be started");
        Watcher { calls: Some(calls), thread: Some(thread) }
    }

    pub fn follow(&self, watch: Watch, event: StreamEvent) {
        let calls = self.calls.as_ref().expect("not dropped yet");
        calls.send((watch, event)).expect("the thread lives as long as the watcher");
    }
}

/// Waits until all calls are complete or aborted.
impl Drop for Watcher {
    fn drop(&mut self) {
        drop(self.calls.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed.
            let _ = thread.join();
        }
    }
}

fn follow_all(communicator: &Communicator, members: &[usize], enqueued: &Receiver<Enqueued>) {
    for (watch, event) in enqueued {
        if !follow(communicator, members, &watch, &event) {
            communicator.abort();
        }
    }
}

/// Returns when the GPU has completed the call, or false when it never will.
fn follow(
    communicator: &Communicator,
    members: &[usize],
    watch: &Watch,
    event: &StreamEvent,
) -> bool {
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
