//! One generation of ranks: start them all, see them through to the end, and leave nobody behind.
//! Never starts a second one; that is for `supervise` to decide.

use std::os::fd::AsRawFd;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use super::ending::{self, Ending, Exit, HOPELESS};
use super::events::{self, Event, Order, Share};
use super::output;
use super::rank::RankProcess;
use super::spec::{Failure, LaunchError, LaunchSpec};
use lockstep_comm::{Identity, Launcher, TokenSource};

/// When one rank failed the others are about to fail over it, and say so better than SIGTERM could.
const TO_REPORT: Duration = Duration::from_secs(2);
/// For the kernel to carry out SIGKILL.
const TO_DIE: Duration = Duration::from_secs(5);
/// For output still in the pipes; longer only if a descendant left the group and holds them open.
const TO_DRAIN: Duration = Duration::from_secs(1);

pub(crate) struct Ended {
    pub failure: Option<Failure>,
    pub interrupted: Option<i32>,
    /// How each of the node's ranks ended, as far as they did.
    pub endings: Vec<Ending>,
    /// What the captain said that is not for a generation to heed.
    pub later: Vec<Order>,
}

impl Ended {
    /// Every rank came to its own end.
    pub fn done(&self) -> bool {
        self.endings.iter().all(|ending| ending.is_success())
    }

    /// Every rank ended in good order.
    pub fn orderly(&self) -> bool {
        self.endings.iter().all(|ending| ending.is_orderly())
    }

    /// A rank failed in a way that another try would repeat.
    pub fn hopeless(&self) -> bool {
        self.failure.is_some() && self.endings.contains(&Ending::Code(HOPELESS))
    }
}

/// How far the ranks were told to end, and how long that may take.
#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Running,
    Reporting(Instant),
    Asked(Instant),
    Killed(Instant),
    GivenUp,
}

/// `on_signal` hears of each signal to this launcher, beside the ranks.
pub(crate) fn run(
    spec: &LaunchSpec,
    share: Share,
    token: String,
    (sender, events): (&Sender<Event>, &Receiver<Event>),
    on_signal: &dyn Fn(i32),
) -> Result<Ended, LaunchError> {
    let began = Instant::now();
    let (done, drained) = mpsc::channel();
    let (generation, first_rank) = (share.generation, share.first_rank);
    let ranks = start_all(spec, share, token, sender, done)?;

    let mut exits: Vec<Exit> = Vec::new();
    let mut later = Vec::new();
    let mut interrupted = None;
    let mut asked_at: Option<Instant> = None;
    let mut phase = Phase::Running;
    while exits.len() < ranks.len() && phase != Phase::GivenUp {
        let event = next(events, phase);
        let before = phase;
        match event {
            Some(Event::Exited { generation: of, local_rank, ending, at }) if of == generation => {
                let exit = Exit {
                    rank: first_rank + local_rank,
                    ending,
                    at: at.saturating_duration_since(began),
                    asked: asked_at.is_some_and(|asked| asked <= at),
                };
                exits.push(exit);
                if phase == Phase::Running && !ending.is_orderly() {
                    note_failure(exit, ranks.len() - exits.len());
                    phase = Phase::Reporting(Instant::now() + TO_REPORT);
                }
            }
            // A straggler of a generation that was given up.
            Some(Event::Exited { .. }) => {}
            Some(Event::Signalled(signal)) => {
                interrupted.get_or_insert(signal);
                phase = after_signal(phase, spec.grace);
                note_signal(signal, phase);
                on_signal(signal);
            }
            Some(Event::Told(Order::Stop)) => {
                if let Phase::Running | Phase::Reporting(_) = phase {
                    phase = Phase::Asked(Instant::now() + spec.grace);
                }
            }
            Some(Event::Told(order)) => {
                if phase == Phase::Running {
                    phase = Phase::Reporting(Instant::now() + TO_REPORT);
                }
                if !matches!(order, Order::End) {
                    later.push(order);
                }
            }
            None => phase = after_timeout(phase, spec.grace_after_failure),
        }
        if phase != before {
            if let Phase::Asked(_) = phase {
                asked_at = Some(Instant::now());
            }
            act_on(phase, &ranks);
        }
    }
    if phase == Phase::GivenUp {
        name_the_undead(&ranks, &exits, first_rank);
    }

    // What a rank left running in its group goes now, and with it the last holders of the pipes.
    ranks.iter().for_each(|rank| rank.signal(libc::SIGKILL));
    let _ = drained.recv_timeout(TO_DRAIN);
    let failure = ending::first_failure(&exits).map(|exit| {
        let log = &ranks[exit.rank - first_rank].log;
        Failure {
            rank: exit.rank,
            generation,
            ending: exit.ending,
            log: log.path.clone(),
            tail: log.tail(),
        }
    });
    let endings = exits.iter().map(|exit| exit.ending).collect();
    Ok(Ended { failure, interrupted, endings, later })
}

/// Spawns from the calling thread, with which the ranks would die. Those that were started before
/// one could not be are ended by being dropped.
fn start_all(
    spec: &LaunchSpec,
    share: Share,
    token: String,
    events: &Sender<Event>,
    done: Sender<()>,
) -> Result<Vec<RankProcess>, LaunchError> {
    let Share { generation, first_rank, slots, size, node, master_addr, master_port, listener } =
        share;
    let mut ranks = Vec::with_capacity(slots.len());
    for (local_rank, slot) in slots.iter().enumerate() {
        let rank = first_rank + local_rank;
        let identity = Identity {
            rank,
            size,
            local_rank,
            local_size: slots.len(),
            node,
            master_addr: master_addr.clone(),
            master_port,
            token: TokenSource::Env(token.clone()),
            generation,
            bind: spec.bind,
            listener_fd: listener.as_ref().filter(|_| rank == 0).map(AsRawFd::as_raw_fd),
            launcher: Launcher::Explicit,
        };
        let process = RankProcess::start(spec, &identity, *slot, done.clone())?;
        events::report_exit(process.pid(), generation, local_rank, events.clone()).map_err(
            |cause| LaunchError::System { act: "start a thread to wait for a rank", cause },
        )?;
        ranks.push(process);
    }
    // Our copy of the listener closes here: if rank 0 dies, who connects is refused at once.
    Ok(ranks)
}

/// The next event, or none when the phase's time is up.
fn next(events: &Receiver<Event>, phase: Phase) -> Option<Event> {
    match phase {
        Phase::Running | Phase::GivenUp => events.recv().ok(),
        Phase::Reporting(until) | Phase::Asked(until) | Phase::Killed(until) => {
            let left = until.saturating_duration_since(Instant::now());
            events.recv_timeout(left).ok()
        }
    }
}

fn after_timeout(phase: Phase, grace: Duration) -> Phase {
    let now = Instant::now();
    match phase {
        Phase::Running => Phase::Running,
        Phase::Reporting(_) if grace.is_zero() => Phase::Killed(now + TO_DIE),
        Phase::Reporting(_) => Phase::Asked(now + grace),
        Phase::Asked(_) => Phase::Killed(now + TO_DIE),
        Phase::Killed(_) | Phase::GivenUp => Phase::GivenUp,
    }
}

/// The first signal is passed on as a request; who asks again means at once.
fn after_signal(phase: Phase, grace: Duration) -> Phase {
    let now = Instant::now();
    match phase {
        Phase::Running | Phase::Reporting(_) => Phase::Asked(now + grace),
        Phase::Asked(_) => Phase::Killed(now + TO_DIE),
        Phase::Killed(_) | Phase::GivenUp => phase,
    }
}

fn act_on(phase: Phase, ranks: &[RankProcess]) {
    let signal = match phase {
        Phase::Asked(_) => libc::SIGTERM,
        // A stopped process obeys this one too.
        Phase::Killed(_) => libc::SIGKILL,
        Phase::Running | Phase::Reporting(_) | Phase::GivenUp => return,
    };
    ranks.iter().for_each(|rank| rank.signal(signal));
}

fn note_failure(exit: Exit, others: usize) {
    if others > 0 {
        let Exit { rank, ending, .. } = exit;
        output::say(&format!("rank {rank} {ending}; ending the other {others}"));
    }
}

fn note_signal(signal: i32, phase: Phase) {
    let act = match phase {
        Phase::Asked(_) => "ending the ranks; once more kills them",
        _ => "killing the ranks",
    };
    output::say(&format!("got {}: {act}", ending::signal_name(signal)));
}

fn name_the_undead(ranks: &[RankProcess], exits: &[Exit], first_rank: usize) {
    for (local_rank, process) in ranks.iter().enumerate() {
        let rank = first_rank + local_rank;
        if !exits.iter().any(|exit| exit.rank == rank) {
            output::say(&format!(
                "rank {rank} (process {}) does not die of SIGKILL: it hangs in the kernel, perhaps on a file system or a device",
                process.pid()
            ));
        }
    }
}
