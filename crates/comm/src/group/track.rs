//! A line of operations that happen one after the other, in the order in which they were asked for:
//! some on the caller's thread, some in the background while the caller computes.
//! Knows nothing of what the operations do.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// `S` is what the operations need: a lane, or one end of a link.
pub(crate) struct Track<S> {
    turns: Mutex<Turns>,
    changed: Condvar,
    state: Mutex<S>,
    courier: Mutex<Option<Sender<Job>>>,
}

struct Turns {
    /// Tickets given out.
    given: u64,
    /// The ticket whose turn it is.
    serving: u64,
}

type Job = Box<dyn FnOnce() + Send>;

impl<S: Send + 'static> Track<S> {
    pub(crate) fn new(state: S) -> Track<S> {
        Track {
            turns: Mutex::new(Turns { given: 0, serving: 0 }),
            changed: Condvar::new(),
            state: Mutex::new(state),
            courier: Mutex::new(None),
        }
    }

    /// Does `work` now, after everything that was asked for before. It gets its number, from 1.
    pub(crate) fn run<R>(&self, work: impl FnOnce(u64, &mut S) -> R) -> R {
        let ticket = self.take_ticket();
        self.serve(ticket, work)
    }

    /// Has `work` done in the background, after everything that was asked for before.
    pub(crate) fn start<R: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(u64, &mut S) -> R + Send + 'static,
    ) -> Pending<R> {
        let result = Arc::new(Slot { value: Mutex::new(None), filled: Condvar::new() });
        let (track, slot) = (self.clone(), result.clone());
        // The ticket is taken under the courier's lock, so that jobs are queued in ticket order.
        let mut courier = lock(&self.courier);
        let ticket = self.take_ticket();
        let job: Job = Box::new(move || {
            let done = std::panic::AssertUnwindSafe(|| track.serve(ticket, work));
            slot.fill(std::panic::catch_unwind(done));
        });
        courier.get_or_insert_with(hire).send(job).expect("the courier lives as long as its track");
        Pending { result }
    }

    fn take_ticket(&self) -> u64 {
        let mut turns = lock(&self.turns);
        turns.given += 1;
        turns.given - 1
    }

    fn serve<R>(&self, ticket: u64, work: impl FnOnce(u64, &mut S) -> R) -> R {
        let mut turns = lock(&self.turns);
        while turns.serving != ticket {
            turns = self.changed.wait(turns).unwrap_or_else(|e| e.into_inner());
        }
        drop(turns);
        // Passed on even if the work panics: the others must not wait for a turn that never comes.
        let _turn = Turn { track: self };
        work(ticket + 1, &mut lock(&self.state))
    }
}

struct Turn<'a, S> {
    track: &'a Track<S>,
}

impl<S> Drop for Turn<'_, S> {
    fn drop(&mut self) {
        let mut turns = lock(&self.track.turns);
        turns.serving += 1;
        if turns.given > turns.serving {
            self.track.changed.notify_all();
        }
    }
}

/// A thread that does jobs until nobody can send it one.
fn hire() -> Sender<Job> {
    let (sender, jobs) = channel::<Job>();
    std::thread::Builder::new()
        .name("lockstep-courier".into())
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

/// An operation under way in the background.
#[must_use = "a started operation must be waited for: that is where its buffers and errors come back"]
pub struct Pending<R> {
    result: Arc<Slot<R>>,
}

impl<R> Pending<R> {
    /// One that is over before it began.
    pub(crate) fn ready(result: R) -> Pending<R> {
        let value = Mutex::new(Some(Ok(result)));
        Pending { result: Arc::new(Slot { value, filled: Condvar::new() }) }
    }

    /// Waits for the end and gives the result.
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

    /// Whether `wait` would return at once.
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
    fn things_happen_in_the_order_they_were_asked_for() {
        let track = Arc::new(Track::new(Vec::new()));
        let first: Vec<_> = (0..10).map(|i| track.start(move |_, v| v.push(i))).collect();
        track.run(|number, v| {
            assert_eq!(number, 11);
            v.push(10);
        });
        let last = track.start(|_, v| v.clone());
        first.into_iter().for_each(Pending::wait);
        assert_eq!(last.wait(), (0..=10).collect::<Vec<_>>());
    }

    #[test]
    fn a_panic_comes_back_to_who_waits_and_nobody_else_is_stuck() {
        let track = Arc::new(Track::new(0));
        let bad: Pending<()> = track.start(|_, _| panic!("as asked"));
        assert_eq!(track.start(|_, v| *v + 1).wait(), 1);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bad.wait()));
        assert!(caught.is_err());
        assert_eq!(track.run(|_, v| *v), 0);
    }
}
