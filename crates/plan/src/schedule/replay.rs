//! Runs the lists of all ranks with blocking receives to find deadlocks. Moves no data and counts no time.

use super::Schedule;
use super::action::Action;
use std::collections::{HashMap, HashSet};
use std::fmt;

/// Runs all lists with blocking receives. Sends block while `depth` messages from one stage to another are in flight;
/// `None` for sends that never block. With a depth of 0 a send blocks until it is received.
pub fn replay(schedule: &Schedule, depth: Option<usize>) -> Result<(), Deadlock> {
    order(schedule, depth).map(|_| ())
}

/// Ranks that wait for each other or for an action that never runs.
#[derive(Clone, PartialEq, Eq)]
pub struct Deadlock {
    /// The ranks that do not finish.
    pub waits: Vec<Wait>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wait {
    pub rank: usize,
    /// The next action, or the finished action whose result cannot be sent.
    pub at: Action,
    /// The action that has to run first, and its rank.
    pub until: Action,
    pub on: usize,
    /// Waits for `until` to receive a message, not to send one.
    pub sending: bool,
}

/// An order of all actions, with their ranks, in which every dependency comes first.
pub(super) fn order(
    schedule: &Schedule,
    depth: Option<usize>,
) -> Result<Vec<(usize, Action)>, Deadlock> {
    let mut walk = Walk::new(schedule, depth);
    loop {
        let before = walk.progress;
        (0..schedule.actions.len()).for_each(|rank| walk.go(rank));
        if walk.progress == before {
            break;
        }
    }
    let waits: Vec<Wait> = (0..schedule.actions.len()).filter_map(|rank| walk.wait(rank)).collect();
    if waits.is_empty() { Ok(walk.done) } else { Err(Deadlock { waits }) }
}

struct Walk<'s> {
    schedule: &'s Schedule,
    depth: usize,
    /// Position of each rank in its list.
    at: Vec<usize>,
    /// Result of each rank that is not sent yet.
    unsent: Vec<Option<Action>>,
    /// Finished actions in order, and as a set.
    done: Vec<(usize, Action)>,
    known: HashSet<Action>,
    /// Sent results, by the action that receives them.
    sent: HashSet<Action>,
    /// Messages in flight, by sending and receiving stage.
    on_the_way: HashMap<(usize, usize), usize>,
    progress: usize,
}

impl<'s> Walk<'s> {
    fn new(schedule: &'s Schedule, depth: Option<usize>) -> Walk<'s> {
        let ranks = schedule.actions.len();
        Walk {
            schedule,
            depth: depth.unwrap_or(usize::MAX),
            at: vec![0; ranks],
            unsent: vec![None; ranks],
            done: Vec::new(),
            known: HashSet::new(),
            sent: HashSet::new(),
            on_the_way: HashMap::new(),
            progress: 0,
        }
    }

    /// Advances a rank until it blocks.
    fn go(&mut self, rank: usize) {
        loop {
            if let Some(action) = self.unsent[rank] {
                if !self.send(action) {
                    return;
                }
                self.unsent[rank] = None;
            } else if let Some(action) = self.next(rank).filter(|a| self.missing(*a).is_none()) {
                self.take(action);
                self.known.insert(action);
                self.done.push((rank, action));
                self.at[rank] += 1;
                self.unsent[rank] = Some(action);
            } else {
                return;
            }
            self.progress += 1;
        }
    }

    fn next(&self, rank: usize) -> Option<Action> {
        self.schedule.actions[rank].get(self.at[rank]).copied()
    }

    /// The missing dependency of `action`: an earlier action of its stage or a message.
    fn missing(&self, action: Action) -> Option<Action> {
        let own = action.follows().filter(|before| !self.known.contains(before));
        let source = action.takes_from(self.schedule.stages());
        own.or(source.filter(|_| !self.sent.contains(&action)))
    }

    /// Sends the pending result if there is room.
    fn send(&mut self, action: Action) -> bool {
        let Some(to) = action.gives_to(self.schedule.stages()) else { return true };
        let ranks = (self.schedule.rank_of(action.stage), self.schedule.rank_of(to.stage));
        let on_the_way = self.on_the_way.entry((action.stage, to.stage)).or_default();
        let room = ranks.0 == ranks.1 || *on_the_way < self.depth;
        if room || self.awaits(ranks.1, to) {
            *self.on_the_way.entry((action.stage, to.stage)).or_default() += 1;
            self.sent.insert(to);
            return true;
        }
        false
    }

    /// Whether `rank` is at `action` with nothing left to send, so that it receives the message at once.
    fn awaits(&self, rank: usize, action: Action) -> bool {
        rank < self.at.len() && self.unsent[rank].is_none() && self.next(rank) == Some(action)
    }

    fn take(&mut self, action: Action) {
        let Some(from) = action.takes_from(self.schedule.stages()) else { return };
        if let Some(count) = self.on_the_way.get_mut(&(from.stage, action.stage)) {
            *count = count.saturating_sub(1);
        }
    }

    /// Reason why a rank does not finish.
    fn wait(&self, rank: usize) -> Option<Wait> {
        let of = |action: Action| self.schedule.rank_of(action.stage);
        if let Some(at) = self.unsent[rank] {
            let until = at.gives_to(self.schedule.stages())?;
            return Some(Wait { rank, at, until, on: of(until), sending: true });
        }
        let at = self.next(rank)?;
        let until = self.missing(at)?;
        Some(Wait { rank, at, until, on: of(until), sending: false })
    }
}

/// `rank 0 waits at 0B0 for 1B0 of rank 1, which waits at 1F1 for 0F1 of rank 0`
/// The text of `Display`, which `?` in `main` and `unwrap` then print.
impl fmt::Debug for Deadlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Deadlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(mut wait) = self.waits.first() else { return f.write_str("nobody waits") };
        write!(f, "rank {} {wait}", wait.rank)?;
        // Follow the waits until they form a cycle or reach a rank that has finished.
        let mut waiting = vec![wait.rank];
        while wait.on != wait.rank {
            let Some(next) = self.waits.iter().find(|next| next.rank == wait.on) else {
                return f.write_str(", which has finished");
            };
            if waiting.contains(&next.rank) {
                return Ok(());
            }
            write!(f, ", which {next}")?;
            waiting.push(next.rank);
            wait = next;
        }
        Ok(())
    }
}

/// Without the waiting rank.
impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wait { at, until, on, .. } = self;
        match (self.sending, self.rank == *on) {
            (true, _) => write!(f, "waits to send {at} until {until} of rank {on} takes it"),
            (false, true) => write!(f, "waits at {at} for {until} of its own"),
            (false, false) => write!(f, "waits at {at} for {until} of rank {on}"),
        }
    }
}

impl std::error::Error for Deadlock {}
