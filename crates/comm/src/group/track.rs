//! A queue of operations that run one after the other, in the order in which they were requested: some on
//! the caller's thread, some in the background while the caller computes.
//! Knows nothing about what the operations do.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::ThreadId;

/// `S` is the state that the operations need: a lane, or one end of a link.
pub(crate) struct Track<S> {
    turns: Mutex<Turns>,
    changed: Condvar,
    state: Mutex<State<S>>,
    /// Jobs for the communication thread, which is started by the first of them.
    jobs: Mutex<Option<Sender<Job>>>,
}

struct Turns {
    /// Number of tickets issued.
    issued: u64,
    /// The ticket whose turn it is.
    serving: u64,
    /// The communication thread, while it has the turn.
    background: Option<ThreadId>,
}

struct State<S> {
    /// Number of operations so far.
    operations: u64,
    state: S,
}

type Job = Box<dyn FnOnce() + Send>;

impl<S: Send + 'static> Track<S> {
    pub(crate) fn new(state: S) -> Track<S> {
        Track {
            turns: Mutex::new(Turns { issued: 0, serving: 0, background: None }),
            changed: Condvar::new(),
            state: Mutex::new(State { operations: 0, state }),
            jobs: Mutex::new(None),
        }
    }

    /// Runs one operation on the caller's thread, after everything that was requested before. Inside a
    /// started sequence it runs at once, as a part of the sequence. The operation gets its number, from 1.
    pub(crate) fn run<R>(&self, operation: impl FnOnce(u64, &mut S) -> R) -> R {
        let _turn = (!self.in_background()).then(|| self.wait_for(self.take_ticket(), None));
        let mut state = lock(&self.state);
        state.operations += 1;
        let number = state.operations;
        operation(number, &mut state.state)
    }

    /// Runs a sequence on the communication thread, after everything that was requested before. The calls of
    /// `run` that it makes belong to it: nothing else happens on this track between them.
    pub(crate) fn start<R: Send + 'static>(
        self: &Arc<Self>,
        sequence: impl FnOnce() -> R + Send + 'static,
    ) -> Pending<R> {
        let result = Arc::new(Slot { value: Mutex::new(None), filled: Condvar::new() });
        let (track, slot) = (self.clone(), result.clone());
        // The ticket is taken under the lock of the queue, so that jobs are queued in ticket order.
        let mut jobs = lock(&self.jobs);
        let ticket = self.take_ticket();
        let job: Job = Box::new(move || {
            let turn = track.wait_for(ticket, Some(std::thread::current().id()));
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(sequence));
            drop(turn);
            slot.fill(done);
        });
        let sent = jobs.get_or_insert_with(communication_thread).send(job);
        sent.expect("the communication thread lives as long as its track");
        Pending { result }
    }

    /// Whether the caller is inside a started sequence of this track.
    pub(crate) fn in_background(&self) -> bool {
        let background = lock(&self.turns).background;
        background.is_some_and(|thread| thread == std::thread::current().id())
    }

    fn take_ticket(&self) -> u64 {
        let mut turns = lock(&self.turns);
        turns.issued += 1;
        turns.issued - 1
    }

    fn wait_for(&self, ticket: u64, background: Option<ThreadId>) -> Turn<'_, S> {
        let mut turns = lock(&self.turns);
        while turns.serving != ticket {
            turns = self.changed.wait(turns).unwrap_or_else(|e| e.into_inner());
        }
        turns.background = background;
        Turn { track: self }
    }
}

/// The right to operate on the track. Passed on even after a panic, so that nobody waits forever.
struct Turn<'a, S> {
    track: &'a Track<S>,
}

impl<S> Drop for Turn<'_, S> {
    fn drop(&mut self) {
        let mut turns = lock(&self.track.turns);
        turns.serving += 1;
        turns.background = None;
        if turns.issued > turns.serving {
            self.track.changed.notify_all();
        }
    }
}

/// Starts a thread that runs jobs until the queue is closed.
fn communication_thread() -> Sender<Job> {
    let (sender, jobs) = channel::<Job>();
    std::thread::Builder::new()
        .name("lockstep-comm".into())
        .spawn(move || jobs.into_iter().for_each(|job| job()))
        .expect("a thread can be started");
    sender
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

struct Slot<R> {
    value: Mutex<Option<std::thread::Result<R>>>,
    filled: Condvar,
}

impl<R> Slot<R> {
    fn fill(&self, value: std::thread::Result<R>) {
        *lock(&self.value) = Some(value);
        self.filled.notify_all();
    }
}

/// An operation that runs in the background.
#[must_use = "wait for a started operation: `wait` returns its buffers and errors"]
pub struct Pending<R> {
    result: Arc<Slot<R>>,
}

impl<R> Pending<R> {
    /// An operation that has finished already.
    pub(crate) fn ready(result: R) -> Pending<R> {
        let value = Mutex::new(Some(Ok(result)));
        Pending { result: Arc::new(Slot { value, filled: Condvar::new() }) }
    }

    /// Waits for the operation to finish and returns its result.
    pub fn wait(self) -> R {
        let mut value = lock(&self.result.value);
        loop {
            match value.take() {
                Some(Ok(result)) => return result,
                Some(Err(panic)) => std::panic::resume_unwind(panic),
                None => {
                    value = self.result.filled.wait(value).unwrap_or_else(|e| e.into_inner());
                }
            }
        }
    }

    /// Whether `wait` would return immediately.
    pub fn is_done(&self) -> bool {
        lock(&self.result.value).is_some()
    }
}

impl<R> std::fmt::Debug for Pending<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pending(done: {})", self.is_done())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_run_in_the_order_of_requests() {
        let track = Arc::new(Track::new(Vec::new()));
        let push = |i| {
            let this = track.clone();
            track.start(move || this.run(|_, v| v.push(i)))
        };
        let first: Vec<_> = (0..10).map(push).collect();
        track.run(|number, v| {
            assert_eq!(number, 11);
            v.push(10);
        });
        let this = track.clone();
        let last = track.start(move || this.run(|_, v| v.clone()));
        first.into_iter().for_each(Pending::wait);
        assert_eq!(last.wait(), (0..=10).collect::<Vec<_>>());
    }

    #[test]
    fn a_sequence_is_not_interrupted() {
        let track = Arc::new(Track::new(Vec::new()));
        let sequence = |first: usize| {
            let this = track.clone();
            track.start(move || (first..first + 3).for_each(|i| this.run(|_, v| v.push(i))))
        };
        let started = [sequence(0), sequence(3)];
        track.run(|number, v| {
            assert_eq!(number, 7);
            v.push(6);
        });
        started.into_iter().for_each(Pending::wait);
        assert_eq!(track.run(|_, v| v.clone()), (0..7).collect::<Vec<_>>());
    }

    #[test]
    fn wait_propagates_a_panic_and_the_track_goes_on() {
        let track = Arc::new(Track::new(0));
        let this = track.clone();
        let bad: Pending<()> = track.start(move || this.run(|_, _| panic!("on purpose")));
        let this = track.clone();
        assert_eq!(track.start(move || this.run(|_, v| *v + 1)).wait(), 1);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bad.wait()));
        assert!(caught.is_err());
        assert_eq!(track.run(|_, v| *v), 0);
    }
}
