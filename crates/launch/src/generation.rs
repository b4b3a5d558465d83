//! One generation of ranks: starts them, supervises them until all have exited, and cleans up. Whether another
//! generation follows is decided by `supervise` or by the coordinator of an elastic job.

use std::os::fd::AsRawFd;
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, Instant};

use lockstep_comm::{Identity, Launcher, TokenSource};

use super::events::{Assignment, Event, Events, Order};
use super::exit::{self, EXIT_PERMANENT, Exit, RankExit};
use super::exit_watch::ExitWatch;
use super::failure_log;
use super::output::{self, OutputMode};
use super::rank::RankProcess;
use super::spec::{Failure, LaunchError, LaunchSpec};
use super::stopped::{self, AllStopped};
use super::sys;

/// Time for the kernel to carry out SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time to read what is left in the pipes. It takes this long only if a descendant left the process group and keeps a
/// pipe open.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct GenerationResult {
    pub failure: Option<Failure>,
    /// The first signal that asked the launcher to stop.
    pub interrupted: Option<i32>,
    /// Exits of the node's ranks. Ranks that hang in the kernel have none.
    pub exits: Vec<Exit>,
    /// Orders that arrived during the generation and concern what follows it.
    pub deferred: Vec<Order>,
}

impl GenerationResult {
    pub fn is_success(&self) -> bool {
        self.exits.iter().all(|exit| exit.is_success())
    }

    pub fn is_graceful(&self) -> bool {
        self.exits.iter().all(|exit| exit.is_graceful())
    }

    /// A rank reported that a restart would fail in the same way.
    pub fn is_permanent_failure(&self) -> bool {
        self.failure.is_some() && self.exits.contains(&Exit::Code(EXIT_PERMANENT))
    }
}

/// How far the ranks have been asked to stop, with the deadline of that phase.
#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Running,
    /// A rank failed. The others are about to fail because of it, and their own errors say more than SIGTERM would.
    Reporting(Instant),
    Terminating(Instant),
    Killing(Instant),
    Abandoned,
}

/// Runs one generation to its end. Ranks die with the calling thread. `on_signal` is called for each signal to this
/// launcher.
pub(crate) fn run(
    spec: &LaunchSpec,
    assignment: Assignment,
    token: String,
    events: &Events,
    on_signal: &dyn Fn(i32),
) -> Result<GenerationResult, LaunchError> {
    let started = Instant::now();
    let (done, drained) = mpsc::channel();
    let (number, first_rank) = (assignment.generation, assignment.first_rank);
    let mut generation = Generation {
        spec,
        number,
        first_rank,
        started,
        oom_kills: sys::oom_kills(),
        ranks: start_ranks(spec, assignment, token, &events.sender, done)?,
        exits: vec![],
        phase: Phase::Running,
        all_stopped: AllStopped::default(),
        requested_at: None,
        interrupted: None,
        deferred: vec![],
    };
    while generation.exits.len() < generation.ranks.len() && generation.phase != Phase::Abandoned {
        let phase = match generation.next_event(events) {
            Some(Event::Signalled(signal)) => {
                let phase = generation.on_signal(signal);
                on_signal(signal);
                phase
            }
            Some(Event::Exited { generation: number, local_rank, exit, at }) => {
                // Ranks of an earlier generation that was abandoned may still exit.
                if number != generation.number {
                    continue;
                }
                generation.on_exit(local_rank, exit, at)
            }
            Some(Event::Ordered(order)) => generation.on_order(order),
            None => generation.on_timeout(),
        };
        generation.enter(phase);
    }
    if generation.phase == Phase::Abandoned {
        generation.report_unkillable();
    }
    // Kills what ranks left running in their process groups; that closes the last pipes.
    generation.signal_ranks(libc::SIGKILL);
    let _ = drained.recv_timeout(DRAIN_TIMEOUT);
    Ok(generation.result())
}

struct Generation<'a> {
    spec: &'a LaunchSpec,
    number: u32,
    first_rank: usize,
    started: Instant,
    /// Counter of the kernel when the generation started.
    oom_kills: Option<u64>,
    ranks: Vec<RankProcess>,
    exits: Vec<RankExit>,
    phase: Phase,
    all_stopped: AllStopped,
    /// When the launcher first signalled the ranks to stop.
    requested_at: Option<Instant>,
    interrupted: Option<i32>,
    deferred: Vec<Order>,
}

impl Generation<'_> {
    /// The next event; `None` when the deadline of the phase has passed, or when it is time to look at the ranks.
    fn next_event(&self, events: &Events) -> Option<Event> {
        match self.phase {
            Phase::Running => events.receiver.recv_timeout(stopped::INTERVAL).ok(),
            Phase::Abandoned => events.receiver.recv().ok(),
            Phase::Reporting(until) | Phase::Terminating(until) | Phase::Killing(until) => {
                let left = until.saturating_duration_since(Instant::now());
                events.receiver.recv_timeout(left).ok()
            }
        }
    }

    fn on_exit(&mut self, local_rank: usize, exit: Exit, at: Instant) -> Phase {
        let rank = self.first_rank + local_rank;
        self.exits.push(RankExit {
            rank,
            exit,
            at: at.saturating_duration_since(self.started),
            requested: self.requested_at.is_some_and(|requested| requested <= at),
        });
        if self.phase != Phase::Running || exit.is_graceful() {
            return self.phase;
        }
        if self.exits.len() < self.ranks.len() {
            output::report(&format!("rank {rank} {exit}; stopping the other ranks"));
        }
        self.reporting()
    }

    /// The first signal asks the ranks to stop; a second SIGINT or SIGQUIT kills them.
    fn on_signal(&mut self, signal: i32) -> Phase {
        self.interrupted.get_or_insert(signal);
        let now = Instant::now();
        let (phase, action) = match self.phase {
            Phase::Running | Phase::Reporting(_) => {
                let seconds = self.spec.grace.as_secs();
                let action = format!("the ranks have {seconds} s to stop; SIGINT kills them");
                (Phase::Terminating(now + self.spec.grace), action)
            }
            Phase::Terminating(until) if !exit::kills_when_second(signal) => {
                let left = until.saturating_duration_since(now).as_secs();
                (self.phase, format!("the ranks still have {left} s to stop; SIGINT kills them"))
            }
            Phase::Terminating(_) => {
                (Phase::Killing(now + KILL_TIMEOUT), "killing the ranks".into())
            }
            Phase::Killing(_) | Phase::Abandoned => (self.phase, "killing the ranks".into()),
        };
        output::report(&format!("received {}: {action}", exit::signal_name(signal)));
        phase
    }

    fn on_order(&mut self, order: Order) -> Phase {
        match (order, self.phase) {
            (Order::Stop, Phase::Running | Phase::Reporting(_)) => {
                Phase::Terminating(Instant::now() + self.spec.grace)
            }
            (Order::Stop, phase) => phase,
            (order, phase) => {
                if !matches!(order, Order::Abort) {
                    self.deferred.push(order);
                }
                if phase == Phase::Running { self.reporting() } else { phase }
            }
        }
    }

    fn on_timeout(&mut self) -> Phase {
        let (now, grace) = (Instant::now(), self.spec.grace_after_failure);
        match self.phase {
            Phase::Running => {
                self.kill_one_of_stopped();
                Phase::Running
            }
            Phase::Reporting(_) if !grace.is_zero() => Phase::Terminating(now + grace),
            Phase::Reporting(_) | Phase::Terminating(_) => Phase::Killing(now + KILL_TIMEOUT),
            Phase::Killing(_) | Phase::Abandoned => Phase::Abandoned,
        }
    }

    /// If all ranks have been stopped for too long, kills one: that is the failure.
    fn kill_one_of_stopped(&mut self) {
        let running: Vec<usize> = (0..self.ranks.len())
            .filter(|one| self.exits.iter().all(|exit| exit.rank != self.first_rank + one))
            .collect();
        let pids: Vec<u32> = running.iter().map(|one| self.ranks[*one].pid()).collect();
        if !self.all_stopped.look(&pids, self.spec.stopped_limit) {
            return;
        }
        let (first, limit) = (running[0], self.spec.stopped_limit.as_secs());
        output::report(&format!(
            "all ranks of this host have been stopped (SIGSTOP) for {limit} s; killing rank {}",
            self.first_rank + first
        ));
        self.ranks[first].signal(libc::SIGKILL);
    }

    fn reporting(&self) -> Phase {
        Phase::Reporting(Instant::now() + self.spec.report_window)
    }

    fn enter(&mut self, phase: Phase) {
        if phase == self.phase {
            return;
        }
        self.phase = phase;
        let signal = match phase {
            Phase::Terminating(_) => libc::SIGTERM,
            // SIGKILL also ends stopped processes.
            Phase::Killing(_) => libc::SIGKILL,
            Phase::Running | Phase::Reporting(_) | Phase::Abandoned => return,
        };
        self.requested_at.get_or_insert_with(Instant::now);
        self.signal_ranks(signal);
    }

    fn signal_ranks(&self, signal: i32) {
        self.ranks.iter().for_each(|rank| rank.signal(signal));
    }

    /// Whether rank 0 has printed this line, and its output is on the terminal.
    fn is_shown(&self, line: &String) -> bool {
        let shows_rank_zero = self.spec.output == OutputMode::RankZero && self.first_rank == 0;
        shows_rank_zero && self.ranks.first().is_some_and(|rank| rank.log.tail().contains(line))
    }

    fn report_unkillable(&self) {
        for (local_rank, process) in self.ranks.iter().enumerate() {
            let rank = self.first_rank + local_rank;
            if !self.exits.iter().any(|exit| exit.rank == rank) {
                output::report(&format!(
                    "rank {rank} (pid {}) did not exit after SIGKILL: it hangs in the kernel, perhaps on a file system or a device",
                    process.pid()
                ));
            }
        }
    }

    fn result(self) -> GenerationResult {
        let failure = exit::first_failure(&self.exits).map(|first| {
            let log = &self.ranks[first.rank - self.first_rank].log;
            let tail = log.tail();
            Failure {
                rank: first.rank,
                generation: self.number,
                exit: first.exit,
                log: log.path.clone(),
                oom_kills: sys::oom_kills().zip(self.oom_kills).map(|(now, then)| now - then),
                shown: tail.last().is_some_and(|line| self.is_shown(line)),
                tail,
            }
        });
        if let Some(failure) = &failure {
            failure_log::append(failure);
        }
        let exits = self.exits.iter().map(|exit| exit.exit).collect();
        GenerationResult { failure, interrupted: self.interrupted, exits, deferred: self.deferred }
    }
}

/// Starts all ranks from the calling thread. If one cannot be started, those before it are dropped, which kills them.
fn start_ranks(
    spec: &LaunchSpec,
    assignment: Assignment,
    token: String,
    events: &Sender<Event>,
    done: Sender<()>,
) -> Result<Vec<RankProcess>, LaunchError> {
    let Assignment { generation, first_rank, slots, size, node, .. } = &assignment;
    let cannot_wait = |cause| LaunchError::System { action: "wait for ranks", cause };
    let mut exits = ExitWatch::new().map_err(cannot_wait)?;
    let mut ranks = Vec::with_capacity(slots.len());
    for (local_rank, slot) in slots.iter().enumerate() {
        let rank = first_rank + local_rank;
        let listener = assignment.listener.as_ref().filter(|_| rank == 0);
        let identity = Identity {
            rank,
            size: *size,
            local_rank,
            local_size: slots.len(),
            node: *node,
            master_addr: assignment.master_addr.clone(),
            master_port: assignment.master_port,
            token: TokenSource::Env(token.clone()),
            generation: *generation,
            bind: spec.bind,
            listener_fd: listener.map(AsRawFd::as_raw_fd),
            transport: spec.transport,
            launcher: Launcher::Explicit,
        };
        let process = RankProcess::start(spec, &identity, *slot, done.clone())?;
        exits.add(process.pid()).map_err(cannot_wait)?;
        ranks.push(process);
    }
    exits.start(*generation, events).map_err(cannot_wait)?;
    // The launcher's copy of the listener closes here, so a dead rank 0 refuses connections.
    Ok(ranks)
}
