//! Who takes part in the next generation, and what is done when somebody comes, goes or fails. Pure: is told what
//! happened and when, and says what to do. Never waits, sends or starts anything itself.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::words::How;
use crate::{Ending, STOPPED, signal_name};

/// What the captain goes by.
pub(crate) struct Rules {
    /// Launchers that are expected at the start.
    pub nodes: usize,
    /// Ranks that are wanted when all are there.
    pub ranks: usize,
    /// How many of so many ranks can work; none when that is not enough to go on.
    pub fit: Box<dyn Fn(usize) -> Option<usize> + Send>,
    /// Restarts without any progress in between.
    pub max_restarts: u32,
    /// How long to wait for all nodes at the start, and for one that was lost.
    pub at_start: Duration,
    pub after_loss: Duration,
    /// How long to wait for as many ranks as are needed at least.
    pub give_up: Duration,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// Begin a generation with these places of these nodes, the ranks in this order.
    Begin(Vec<(u32, Vec<usize>)>),
    /// Have the ranks of these nodes save and stop.
    Stop(Vec<u32>),
    /// End the ranks of these nodes.
    End(Vec<u32>),
    /// This node may go, with this exit code.
    Bye {
        node: u32,
        code: i32,
        text: String,
    },
    Say(String),
}

pub(crate) struct Captain {
    rules: Rules,
    nodes: BTreeMap<u32, Node>,
    phase: Phase,
    /// Until when to wait for those who are missing.
    patient_until: Duration,
    /// The furthest that the job has come.
    progress: u64,
    restarts: u32,
    /// How often each place failed first since the last progress.
    failures: BTreeMap<(u32, usize), u32>,
    taken_out: BTreeSet<(u32, usize)>,
    now: Duration,
}

struct Node {
    name: String,
    slots: usize,
    /// The signal by which its launcher was told to end.
    leaving: Option<i32>,
}

enum Phase {
    Gathering { since: Duration },
    Running(Running),
    Over,
}

struct Running {
    ranks: usize,
    /// The nodes that take part, with their places; how each ended, once it has.
    members: BTreeMap<u32, (Vec<usize>, Option<How>)>,
    /// The ranks were asked to stop, so that more can take part.
    growing: bool,
    /// Nodes came; when to ask.
    grow_at: Option<Duration>,
    lost: Vec<String>,
}

/// How long to wait for others that may come with one that came.
const SETTLE: Duration = Duration::from_secs(1);
/// A place that failed first this often without progress is taken out.
const TAKEN_OUT_AFTER: u32 = 2;
/// The node of the captain itself: where it leaves, the job stops.
pub(crate) const FIRST: u32 = 0;

impl Captain {
    pub fn new(rules: Rules, progress: u64) -> Captain {
        Captain {
            patient_until: rules.at_start,
            rules,
            nodes: BTreeMap::new(),
            phase: Phase::Gathering { since: Duration::ZERO },
            progress,
            restarts: 0,
            failures: BTreeMap::new(),
            taken_out: BTreeSet::new(),
            now: Duration::ZERO,
        }
    }

    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    /// A launcher is there, with so many places for ranks.
    pub fn came(&mut self, now: Duration, id: u32, name: &str, slots: usize) -> Vec<Act> {
        self.now = now;
        // The same node once more: what was there before is gone, only nobody has noticed yet.
        let mut acts = match self.nodes.contains_key(&id) {
            true => self.lost(now, id),
            false => vec![],
        };
        self.nodes.insert(id, Node { name: name.into(), slots, leaving: None });
        if let Phase::Running(running) = &mut self.phase
            && !running.growing
        {
            running.grow_at = Some(now + SETTLE);
        }
        acts.extend(self.settle());
        acts
    }

    /// A launcher is out of reach.
    pub fn lost(&mut self, now: Duration, id: u32) -> Vec<Act> {
        self.now = now;
        let Some(node) = self.nodes.remove(&id) else { return vec![] };
        self.patient_until = self.patient_until.max(now + self.rules.after_loss);
        let mut acts = vec![Act::Say(format!("node {id} ({}) is lost", node.name))];
        // One whose ranks had all ended is not missed.
        if let Phase::Running(running) = &mut self.phase
            && running.unfinished().contains(&id)
        {
            running.members.remove(&id);
            running.lost.push(format!("node {id} ({})", node.name));
            acts.extend(running.end());
        }
        acts.extend(self.settle());
        acts
    }

    /// A launcher was told by a signal to end. Its ranks have been asked to stop already, and the others stop with
    /// them.
    pub fn leaving(&mut self, now: Duration, id: u32, signal: i32) -> Vec<Act> {
        self.now = now;
        if let Some(node) = self.nodes.get_mut(&id) {
            node.leaving.get_or_insert(signal);
        }
        self.settle()
    }

    /// All ranks of a node have ended. `progress` is how far the job has come by now.
    pub fn ended(&mut self, now: Duration, id: u32, how: How, progress: u64) -> Vec<Act> {
        self.now = now;
        let Phase::Running(running) = &mut self.phase else { return vec![] };
        let Some(member) = running.members.get_mut(&id) else { return vec![] };
        let failed = matches!(how, How::Failed { .. });
        member.1 = Some(how);
        let mut acts = vec![];
        if failed {
            acts.extend(running.end());
        }
        if progress > self.progress {
            self.progress = progress;
            self.restarts = 0;
            self.failures.clear();
        }
        acts.extend(self.settle());
        acts
    }

    /// A generation could not be begun.
    pub fn failed_to_begin(&mut self, why: &str) -> Vec<Act> {
        self.over(1, why)
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) -> Vec<Act> {
        self.now = now;
        self.settle()
    }

    fn settle(&mut self) -> Vec<Act> {
        match &mut self.phase {
            Phase::Over => vec![],
            Phase::Gathering { since } => {
                let since = *since;
                self.gather(since)
            }
            Phase::Running(running) => {
                if running.unfinished().is_empty() {
                    return self.conclude();
                }
                self.grow()
            }
        }
    }

    /// Begins a generation when everybody is there, or when those who are suffice and time is up.
    fn gather(&mut self, since: Duration) -> Vec<Act> {
        if let Some(signal) = self.nodes.get(&FIRST).and_then(|node| node.leaving) {
            let signal = signal_name(signal);
            return self.over(STOPPED, &format!("got {signal} between two generations"));
        }
        let leave: Vec<u32> = self.leavers();
        let mut acts: Vec<Act> = leave.into_iter().map(|node| self.dismiss(node)).collect();
        let here = self.here();
        let complete = self.nodes.len() >= self.rules.nodes || here >= self.wanted();
        let fitting = (self.rules.fit)(here);
        match fitting {
            Some(ranks) if complete || self.now >= self.patient_until => {
                acts.extend(self.begin(ranks));
            }
            None if self.now >= since + self.rules.give_up => {
                let text = format!(
                    "{here} ranks can be started on {} of {} nodes, and that is not enough; waited {} s",
                    self.nodes.len(),
                    self.rules.nodes,
                    self.rules.give_up.as_secs()
                );
                acts.extend(self.over(1, &text));
            }
            _ => {}
        }
        acts
    }

    fn begin(&mut self, ranks: usize) -> Vec<Act> {
        let (mut left, mut seats) = (ranks, vec![]);
        for (id, node) in &self.nodes {
            let free = (0..node.slots).filter(|slot| !self.taken_out.contains(&(*id, *slot)));
            let slots: Vec<usize> = free.take(left).collect();
            left -= slots.len();
            if !slots.is_empty() {
                seats.push((*id, slots));
            }
        }
        let members = seats.iter().map(|(id, slots)| (*id, (slots.clone(), None))).collect();
        let wanted = self.wanted();
        self.phase =
            Phase::Running(Running { ranks, members, growing: false, grow_at: None, lost: vec![] });
        // The patience of the start ends with it: who is lost from here on is waited for as after any loss.
        self.patient_until = self.now;
        let mut acts = vec![];
        if ranks < wanted {
            acts.push(Act::Say(format!("going on with {ranks} of {wanted} ranks")));
        }
        acts.push(Act::Begin(seats));
        acts
    }

    /// Asks the ranks to stop when there are more than take part.
    fn grow(&mut self) -> Vec<Act> {
        let here = self.here();
        let Phase::Running(running) = &mut self.phase else { return vec![] };
        match running.grow_at {
            Some(at) if self.now >= at => running.grow_at = None,
            _ => return vec![],
        }
        let more = (self.rules.fit)(here).filter(|ranks| *ranks > running.ranks);
        let Some(more) = more.filter(|_| running.lost.is_empty()) else { return vec![] };
        running.growing = true;
        let text =
            format!("{here} ranks can be had: stopping {} to go on with {more}", running.ranks);
        vec![Act::Say(text), Act::Stop(running.unfinished())]
    }

    /// All ranks of a generation have ended: what comes next.
    fn conclude(&mut self) -> Vec<Act> {
        let before = std::mem::replace(&mut self.phase, Phase::Gathering { since: self.now });
        let Phase::Running(Running { members, growing, lost, .. }) = before else { return vec![] };
        let all = |wanted: fn(&How) -> bool| {
            lost.is_empty() && members.values().all(|(_, how)| how.as_ref().is_some_and(wanted))
        };
        if all(|how| matches!(how, How::Done)) {
            return self.over(0, "");
        }
        let stopped = all(|how| matches!(how, How::Stopped | How::Done));
        if let Some(signal) = self.nodes.get(&FIRST).and_then(|node| node.leaving) {
            return match stopped {
                true => self.over(STOPPED, "stopped as asked, and saved"),
                false => {
                    let code = Ending::Signal(signal).exit_code();
                    self.over(code, "ended as asked, but not all ranks had saved by then")
                }
            };
        }
        if stopped && !growing && self.leavers().is_empty() {
            return self.over(STOPPED, "the ranks were asked to stop, and saved");
        }
        if !stopped && let Some(acts) = self.after_failure(&members, &lost) {
            return acts;
        }
        self.settle()
    }

    /// Counts a failure; what to do if that was one too many.
    fn after_failure(
        &mut self,
        members: &BTreeMap<u32, (Vec<usize>, Option<How>)>,
        lost: &[String],
    ) -> Option<Vec<Act>> {
        // With a node lost, what the others say is about that.
        let failed =
            members.iter().filter(|_| lost.is_empty()).find_map(|(id, (slots, how))| match how {
                Some(How::Failed { local_rank, code, hopeless, .. }) => {
                    Some((*id, slots.get(*local_rank).copied(), *code, *hopeless))
                }
                _ => None,
            });
        if let Some((_, _, code, true)) = failed {
            // The number is for us; to others it is an error like any.
            let code = if code == crate::HOPELESS { 1 } else { code };
            return Some(self.over(code, "another try would fail in the same way"));
        }
        let code = failed.map_or(1, |(_, _, code, _)| code);
        self.restarts += 1;
        let mut acts = vec![];
        if let Some((id, Some(slot), ..)) = failed {
            let count = *self.failures.entry((id, slot)).and_modify(|n| *n += 1).or_insert(1);
            let suffices = (self.rules.fit)(self.here().saturating_sub(1)).is_some();
            // Rank 0 is on the captain's own node.
            let last = id == FIRST && self.free(id) == 1;
            if count >= TAKEN_OUT_AFTER && suffices && !last {
                self.taken_out.insert((id, slot));
                self.restarts = 1;
                acts.push(Act::Say(format!(
                    "place {slot} of node {id} failed {TAKEN_OUT_AFTER} times without a new checkpoint in between and is left out"
                )));
            }
        }
        let most = self.rules.max_restarts;
        if self.restarts > most {
            let text = match most {
                0 => String::new(),
                _ => format!("{most} restarts without a new checkpoint in between are enough"),
            };
            return Some(self.over(code, &text));
        }
        let text = format!(
            "starting anew (restart {} of at most {most} without a new checkpoint in between)",
            self.restarts
        );
        acts.push(Act::Say(text));
        acts.extend(self.settle());
        Some(acts)
    }

    fn over(&mut self, code: i32, text: &str) -> Vec<Act> {
        self.phase = Phase::Over;
        let bye = |node: &u32| Act::Bye { node: *node, code, text: text.to_string() };
        // The first node goes last: it is the captain's own.
        self.nodes.keys().rev().map(bye).collect()
    }

    fn dismiss(&mut self, node: u32) -> Act {
        self.nodes.remove(&node);
        Act::Bye { node, code: STOPPED, text: "the others go on without this node".into() }
    }

    fn leavers(&self) -> Vec<u32> {
        let leaves = |(id, node): (&u32, &Node)| node.leaving.is_some().then_some(*id);
        self.nodes.iter().filter_map(leaves).collect()
    }

    /// Places for ranks on the nodes that are there.
    fn here(&self) -> usize {
        let stays = self.nodes.iter().filter(|(_, node)| node.leaving.is_none());
        stays.map(|(id, _)| self.free(*id)).sum()
    }

    /// Places of one node.
    fn free(&self, id: u32) -> usize {
        let slots = self.nodes.get(&id).map_or(0, |node| node.slots);
        (0..slots).filter(|slot| !self.taken_out.contains(&(id, *slot))).count()
    }

    fn wanted(&self) -> usize {
        self.rules.ranks.saturating_sub(self.taken_out.len())
    }
}

impl Running {
    /// Ends those who are still at work.
    fn end(&self) -> Option<Act> {
        let unfinished = self.unfinished();
        (!unfinished.is_empty()).then_some(Act::End(unfinished))
    }

    /// The nodes whose ranks have not all ended.
    fn unfinished(&self) -> Vec<u32> {
        let open =
            |(id, (_, how)): (&u32, &(Vec<usize>, Option<How>))| how.is_none().then_some(*id);
        self.members.iter().filter_map(open).collect()
    }
}

#[cfg(test)]
#[path = "captain_tests.rs"]
mod tests;
