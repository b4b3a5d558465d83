//! The threads of one rank: a fork-join team that runs one task at a time, without allocating. Knows nothing about
//! tensors.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, Thread};

/// A task, called once per member with the member's index and the team size.
type Task<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// A team of the caller and `size - 1` helper threads.
///
/// ```
/// use lockstep_kernels::Team;
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// let team = Team::new(3);
/// let sum = AtomicUsize::new(0);
/// team.run(&|member, size| {
///     assert_eq!(size, 3);
///     sum.fetch_add(member, Ordering::Relaxed);
/// });
/// assert_eq!(sum.into_inner(), 0 + 1 + 2);
/// ```
pub struct Team {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    /// Held during `run`, so that concurrent callers run one after the other.
    running: Mutex<()>,
}

struct Shared {
    size: usize,
    /// The task of the current round; only valid between the start and the end of the round.
    task: TaskCell,
    /// Number of the current round. Helpers wait for it to change.
    round: AtomicUsize,
    /// Helpers that have not finished the current round.
    busy: AtomicUsize,
    failed: AtomicBool,
    closing: AtomicBool,
    caller: Mutex<Option<Thread>>,
}

/// The task of the current round with its lifetime erased; see `run`.
struct TaskCell(std::cell::UnsafeCell<Option<Task<'static>>>);

// SAFETY: the caller writes the cell before it publishes a new round (Release), and helpers read it only after they
// have seen that round (Acquire). It is not written again before all helpers have finished.
unsafe impl Sync for TaskCell {}
// SAFETY: the task is Sync, so a reference to it may be sent to another thread.
unsafe impl Send for TaskCell {}

/// Iterations that a wait spins before it parks the thread. About 20 µs: longer than the gap between two operations
/// of a step, but much shorter than a time slice.
const SPINS: usize = 2_000;

impl Team {
    /// A team of `size` members, including the caller.
    pub fn new(size: usize) -> Team {
        assert!(size > 0, "a team needs at least one member");
        let shared = Arc::new(Shared {
            size,
            task: TaskCell(None.into()),
            round: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            caller: Mutex::new(None),
        });
        let helpers = (1..size)
            .map(|member| {
                let shared = shared.clone();
                thread::Builder::new()
                    .name(format!("team-{member}"))
                    .spawn(move || shared.help(member))
                    .expect("cannot start a team thread")
            })
            .collect();
        Team { shared, helpers, running: Mutex::new(()) }
    }

    /// Number of members, including the caller.
    pub fn size(&self) -> usize {
        self.shared.size
    }

    /// Runs `task` once on every member and returns when all are done. The task must not call `run` on the same team.
    ///
    /// # Panics
    /// If the task panicked on any member.
    pub fn run(&self, task: &(dyn Fn(usize, usize) + Sync)) {
        let size = self.shared.size;
        if size == 1 {
            return task(0, 1);
        }
        let _running = self.running.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let shared = &*self.shared;
        *shared.caller.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) =
            Some(thread::current());
        // SAFETY: only the lifetime changes. Helpers do not use the reference after `run` returns: each finishes the
        // task before it decrements `busy`, and `run` waits for `busy` to be zero, even if the task panics.
        let erased = unsafe { std::mem::transmute::<Task<'_>, Task<'static>>(task) };
        // SAFETY: no round is in progress (`busy` is zero and we hold `running`), so no helper reads the cell.
        unsafe { *shared.task.0.get() = Some(erased) };
        shared.busy.store(size - 1, Ordering::Relaxed);
        shared.round.fetch_add(1, Ordering::Release);
        for helper in &self.helpers {
            helper.thread().unpark();
        }
        let mine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| task(0, size)));
        wait_until(|| shared.busy.load(Ordering::Acquire) == 0);
        let failed = shared.failed.swap(false, Ordering::Relaxed);
        if let Err(panic) = mine {
            std::panic::resume_unwind(panic);
        }
        assert!(!failed, "a team thread panicked; its message is printed above");
    }

    /// Splits `0..len` into one range per member, at multiples of `grain`, and calls `task` with each non-empty range.
    pub fn split(&self, len: usize, grain: usize, task: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
        let grains = len.div_ceil(grain.max(1));
        if self.size() == 1 || grains <= 1 {
            return if len > 0 {
                task(0..len)
            };
        }
        self.run(&|member, size| {
            let from = grains * member / size * grain;
            let to = (grains * (member + 1) / size * grain).min(len);
            if from < to {
                task(from..to);
            }
        });
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        self.shared.round.fetch_add(1, Ordering::Release);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            // Helpers catch the panics of their tasks, so joining cannot fail.
            let _ = helper.join();
        }
    }
}

impl Shared {
    fn help(&self, member: usize) {
        let mut seen = 0;
        loop {
            wait_until(|| self.round.load(Ordering::Acquire) != seen);
            seen += 1;
            if self.closing.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: this round was published after the cell was written, and the caller waits for this helper.
            let task = unsafe { *self.task.0.get() }.expect("a round has a task");
            let outcome =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| task(member, self.size)));
            if outcome.is_err() {
                self.failed.store(true, Ordering::Relaxed);
            }
            // The caller may return as soon as `busy` is zero, so its handle is cloned first.
            let caller =
                self.caller.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
            if self.busy.fetch_sub(1, Ordering::Release) == 1
                && let Some(caller) = caller
            {
                caller.unpark();
            }
        }
    }
}

/// Waits until `ready` is true: spins first, then parks. The thread that makes `ready` true unparks this one.
fn wait_until(ready: impl Fn() -> bool) {
    for _ in 0..SPINS {
        if ready() {
            return;
        }
        std::hint::spin_loop();
    }
    while !ready() {
        thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_visited_once() {
        for size in 1..5 {
            let team = Team::new(size);
            for (len, grain) in [(0, 4), (1, 4), (7, 2), (4099, 16), (3, 100)] {
                let visits: Vec<AtomicUsize> = (0..len).map(|_| AtomicUsize::new(0)).collect();
                team.split(len, grain, &|range| {
                    visits[range].iter().for_each(|visit| {
                        visit.fetch_add(1, Ordering::Relaxed);
                    })
                });
                assert!(
                    visits.iter().all(|visit| visit.load(Ordering::Relaxed) == 1),
                    "{size} {len} {grain}"
                );
            }
        }
    }

    #[test]
    fn consecutive_rounds_run_on_all_members() {
        let team = Team::new(3);
        let total = AtomicUsize::new(0);
        for _ in 0..10_000 {
            team.run(&|_, _| {
                total.fetch_add(1, Ordering::Relaxed);
            });
        }
        assert_eq!(total.into_inner(), 30_000);
    }

    #[test]
    fn a_panic_of_a_helper_reaches_the_caller_and_the_team_stays_usable() {
        let team = Team::new(2);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            team.run(&|member, _| assert_ne!(member, 1, "on purpose"));
        }));
        assert!(result.is_err());
        let total = AtomicUsize::new(0);
        team.run(&|_, _| {
            total.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(total.into_inner(), 2);
    }
}
