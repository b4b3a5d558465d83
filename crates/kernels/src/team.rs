//! The threads of one rank: a fork-join team that runs one piece of work at a time and allocates nothing
//! while it does. Knows nothing of tensors.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, Thread};

/// A piece of work: called once per member, with the member's number and how many there are.
type Work<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// A caller and `size - 1` helpers that wait for work.
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
    /// Held during `run`: two callers take turns.
    turn: Mutex<()>,
}

struct Shared {
    size: usize,
    /// The work of the present round; only valid between a round's start and its end.
    work: WorkCell,
    /// Counts rounds. Helpers wait for it to change.
    round: AtomicUsize,
    /// Helpers that have not finished the present round.
    busy: AtomicUsize,
    failed: AtomicBool,
    closing: AtomicBool,
    caller: Mutex<Option<Thread>>,
}

/// The one pointer that crosses threads, with its lifetime taken off; see `run`.
struct WorkCell(std::cell::UnsafeCell<Option<Work<'static>>>);

// SAFETY: the caller writes the cell before it publishes a new round (Release) and helpers read it only
// after they have seen that round (Acquire); nobody writes it again before every helper has finished.
unsafe impl Sync for WorkCell {}
// SAFETY: the pointee is Sync, so a reference to it may go to another thread.
unsafe impl Send for WorkCell {}

/// How often a wait looks again before it lets the kernel have the core. About 20 µs: longer than the gap
/// between two operations of a step, short beside a time slice.
const SPINS: usize = 2_000;

impl Team {
    /// A team of `size` members, the caller among them.
    pub fn new(size: usize) -> Team {
        assert!(size > 0, "a team has at least its caller");
        let shared = Arc::new(Shared {
            size,
            work: WorkCell(None.into()),
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
                    .expect("the system has no thread left for the team")
            })
            .collect();
        Team { shared, helpers, turn: Mutex::new(()) }
    }

    /// The caller and its helpers.
    pub fn size(&self) -> usize {
        self.shared.size
    }

    /// Runs `work` once on every member and returns when all are done. Work must not call `run` on the
    /// same team.
    ///
    /// # Panics
    /// When the work panicked on any member.
    pub fn run(&self, work: &(dyn Fn(usize, usize) + Sync)) {
        let size = self.shared.size;
        if size == 1 {
            return work(0, 1);
        }
        let _turn = self.turn.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let shared = &*self.shared;
        *shared.caller.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) =
            Some(thread::current());
        // SAFETY: only the lifetime is changed. The reference is dead to helpers before `run` returns: each
        // lets go of it before it leaves `busy`, and `run` waits for `busy` to be zero, even when it panics.
        let forever = unsafe { std::mem::transmute::<Work<'_>, Work<'static>>(work) };
        // SAFETY: no round is open (`busy` is zero and we hold the turn), so no helper reads the cell.
        unsafe { *shared.work.0.get() = Some(forever) };
        shared.busy.store(size - 1, Ordering::Relaxed);
        shared.round.fetch_add(1, Ordering::Release);
        for helper in &self.helpers {
            helper.thread().unpark();
        }
        let mine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(0, size)));
        wait_until(|| shared.busy.load(Ordering::Acquire) == 0);
        let failed = shared.failed.swap(false, Ordering::Relaxed);
        if let Err(panic) = mine {
            std::panic::resume_unwind(panic);
        }
        assert!(!failed, "a member of the team panicked; its message stands above");
    }

    /// Cuts `0..len` into one run of whole `grain`s per member and calls `work` with each that is not empty.
    pub fn split(&self, len: usize, grain: usize, work: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
        let grains = len.div_ceil(grain.max(1));
        if self.size() == 1 || grains <= 1 {
            return if len > 0 {
                work(0..len)
            };
        }
        self.run(&|member, size| {
            let from = grains * member / size * grain;
            let to = (grains * (member + 1) / size * grain).min(len);
            if from < to {
                work(from..to);
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
            // A helper catches the panics of its work, so it has none of its own.
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
            // SAFETY: this round was published after the cell was written, and the caller waits for us.
            let work = unsafe { *self.work.0.get() }.expect("a round has work");
            let outcome =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(member, self.size)));
            if outcome.is_err() {
                self.failed.store(true, Ordering::Relaxed);
            }
            // The caller may return as soon as `busy` is zero, so its handle is taken before.
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

/// Spins for a moment, then sleeps between looks; whoever makes `ready` true unparks this thread after.
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
    fn many_rounds_follow_each_other() {
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
    fn a_panic_of_a_helper_reaches_the_caller_and_the_team_goes_on() {
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
