//! Decides which nodes take part in the next generation, and what to do when nodes join, leave or fail. A pure state
//! machine: it is given events with their times and returns decisions. Never waits, sends or starts anything.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::RestartPolicy;
use super::messages::NodeResult;
use crate::exit::{EXIT_DEVICE_LOST, EXIT_PERMANENT, EXIT_STOPPED, Exit, signal_name};

/// The parameters of the coordinator's decisions.
pub(crate) struct Rules {
    /// Number of nodes expected at the start.
    pub nodes: usize,
    /// Number of ranks when all nodes are available.
    pub ranks: usize,
    /// How many of the given number of ranks can work together; `None` if too few.
    pub fit: Box<dyn Fn(usize) -> Option<usize> + Send>,
    pub policy: RestartPolicy,
}

/// The slots of each node that get a rank, in order of the ranks.
pub(crate) type Seats = Vec<(u32, Vec<usize>)>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Start a generation.
    Start(Seats),
    /// Ask the ranks of these nodes to save and stop.
    Stop(Vec<u32>),
    /// Terminate the ranks of these nodes.
    Abort(Vec<u32>),
    /// Let this node's launcher exit.
    Finish { node: u32, code: i32, text: String },
    /// Print a message.
    Report(String),
}

pub(crate) struct Coordinator {
    rules: Rules,
    nodes: BTreeMap<u32, Node>,
    phase: Phase,
    /// Until when to wait for missing nodes.
    wait_until: Duration,
    /// The largest progress seen so far.
    progress: u64,
    /// Restarts since the last progress.
    restarts: u32,
    /// First failures of each slot since the last progress.
    failures: BTreeMap<(u32, usize), u32>,
    /// Slots that get no ranks any more.
    excluded: BTreeSet<(u32, usize)>,
    now: Duration,
}

struct Node {
    name: String,
    slots: usize,
    /// The signal that asked its launcher to stop.
    leaving: Option<i32>,
}

enum Phase {
    Gathering { since: Duration },
    Running(Running),
    Finished,
}

struct Running {
    ranks: usize,
    members: BTreeMap<u32, Member>,
    /// The member that first reported a failure.
    first_failed: Option<u32>,
    /// The ranks were asked to stop so that more can take part.
    growing: bool,
    /// Nodes have joined; when to decide whether to grow.
    grow_at: Option<Duration>,
    /// A member was lost.
    lost: bool,
}

/// A node that takes part in the running generation.
struct Member {
    slots: Vec<usize>,
    result: Option<NodeResult>,
}

struct FirstFailure {
    node: u32,
    slot: Option<usize>,
    code: i32,
    permanent: bool,
}

/// How long to wait after a node joined for others that may join with it.
const SETTLE: Duration = Duration::from_secs(1);
/// A slot that was the first to fail this many times without progress is excluded.
const EXCLUDE_AFTER: u32 = 2;
/// The coordinator's own node. When it leaves, the job stops.
pub(crate) const NODE_ZERO: u32 = 0;

impl Coordinator {
    pub fn new(rules: Rules, progress: u64) -> Coordinator {
        Coordinator {
            wait_until: rules.policy.start_timeout,
            rules,
            nodes: BTreeMap::new(),
            phase: Phase::Gathering { since: Duration::ZERO },
            progress,
            restarts: 0,
            failures: BTreeMap::new(),
            excluded: BTreeSet::new(),
            now: Duration::ZERO,
        }
    }

    pub fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Finished)
    }

    /// A node joined, with this number of slots for ranks.
    pub fn node_joined(
        &mut self,
        now: Duration,
        id: u32,
        name: &str,
        slots: usize,
    ) -> Vec<Decision> {
        self.now = now;
        // A known node that joins again was restarted before its loss was noticed.
        let mut decisions = match self.nodes.contains_key(&id) {
            true => self.node_lost(now, id),
            false => vec![],
        };
        self.nodes.insert(id, Node { name: name.into(), slots, leaving: None });
        if let Phase::Running(running) = &mut self.phase
            && !running.growing
        {
            running.grow_at = Some(now + SETTLE);
        }
        decisions.extend(self.decide());
        decisions
    }

    /// The connection to a node is lost.
    pub fn node_lost(&mut self, now: Duration, id: u32) -> Vec<Decision> {
        self.now = now;
        let Some(node) = self.nodes.remove(&id) else { return vec![] };
        self.wait_until = self.wait_until.max(now + self.rules.policy.loss_timeout);
        let mut decisions = vec![Decision::Report(format!("lost node {id} ({})", node.name))];
        // A member whose ranks have all exited does not matter.
        if let Phase::Running(running) = &mut self.phase
            && running.unfinished().contains(&id)
        {
            running.members.remove(&id);
            running.lost = true;
            decisions.extend(running.abort());
        }
        decisions.extend(self.decide());
        decisions
    }

    /// A node's launcher received a signal. It has asked its ranks to stop, and the ranks of the other nodes stop with
    /// them.
    pub fn node_leaving(&mut self, now: Duration, id: u32, signal: i32) -> Vec<Decision> {
        self.now = now;
        if let Some(node) = self.nodes.get_mut(&id) {
            node.leaving.get_or_insert(signal);
        }
        self.decide()
    }

    /// All ranks of a node have exited. `progress` is the current progress of the job.
    pub fn node_finished(
        &mut self,
        now: Duration,
        id: u32,
        result: NodeResult,
        progress: u64,
    ) -> Vec<Decision> {
        self.now = now;
        let Phase::Running(running) = &mut self.phase else { return vec![] };
        let Some(member) = running.members.get_mut(&id) else { return vec![] };
        let failed = matches!(result, NodeResult::Failed { .. });
        member.result = Some(result);
        let mut decisions = vec![];
        if failed {
            running.first_failed.get_or_insert(id);
            decisions.extend(running.abort());
        }
        if progress > self.progress {
            self.progress = progress;
            self.restarts = 0;
            self.failures.clear();
        }
        decisions.extend(self.decide());
        decisions
    }

    /// A generation could not be started.
    pub fn start_failed(&mut self, error: &str) -> Vec<Decision> {
        self.finish(1, error)
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) -> Vec<Decision> {
        self.now = now;
        self.decide()
    }

    fn decide(&mut self) -> Vec<Decision> {
        match &mut self.phase {
            Phase::Finished => vec![],
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

    /// Starts a generation when all nodes are available, or when enough are and the wait is over.
    fn gather(&mut self, since: Duration) -> Vec<Decision> {
        if let Some(signal) = self.stop_signal() {
            let signal = signal_name(signal);
            return self.finish(EXIT_STOPPED, &format!("received {signal} while no ranks ran"));
        }
        let mut decisions: Vec<Decision> =
            self.leaving_nodes().into_iter().map(|node| self.dismiss(node)).collect();
        let available = self.available();
        let complete = self.nodes.len() >= self.rules.nodes || available >= self.wanted();
        match (self.rules.fit)(available) {
            Some(ranks) if complete || self.now >= self.wait_until => {
                decisions.extend(self.start(ranks));
            }
            None if self.now >= since + self.rules.policy.give_up => {
                let text = format!(
                    "giving up after {} s: {} of {} nodes joined, and their {available} ranks are too few",
                    self.rules.policy.give_up.as_secs(),
                    self.nodes.len(),
                    self.rules.nodes,
                );
                decisions.extend(self.finish(1, &text));
            }
            _ => {}
        }
        decisions
    }

    fn start(&mut self, ranks: usize) -> Vec<Decision> {
        let (mut left, mut seats) = (ranks, vec![]);
        for (id, node) in &self.nodes {
            let usable = (0..node.slots).filter(|slot| !self.excluded.contains(&(*id, *slot)));
            let slots: Vec<usize> = usable.take(left).collect();
            left -= slots.len();
            if !slots.is_empty() {
                seats.push((*id, slots));
            }
        }
        let member =
            |(id, slots): &(u32, Vec<usize>)| (*id, Member { slots: slots.clone(), result: None });
        self.phase = Phase::Running(Running {
            ranks,
            members: seats.iter().map(member).collect(),
            first_failed: None,
            growing: false,
            grow_at: None,
            lost: false,
        });
        // The start timeout applies only before the first generation.
        self.wait_until = self.now;
        let mut decisions = vec![];
        let wanted = self.wanted();
        if ranks < wanted {
            let text = format!("continuing with {ranks} of {wanted} ranks");
            decisions.push(Decision::Report(text));
        }
        decisions.push(Decision::Start(seats));
        decisions
    }

    /// Asks the ranks to stop if more ranks can take part in another generation.
    fn grow(&mut self) -> Vec<Decision> {
        let available = self.available();
        let Phase::Running(running) = &mut self.phase else { return vec![] };
        match running.grow_at {
            Some(at) if self.now >= at => running.grow_at = None,
            _ => return vec![],
        }
        let more = (self.rules.fit)(available).filter(|ranks| *ranks > running.ranks);
        let Some(more) = more.filter(|_| !running.lost) else { return vec![] };
        running.growing = true;
        let text = format!(
            "{available} ranks are available: stopping {} ranks to continue with {more}",
            running.ranks
        );
        vec![Decision::Report(text), Decision::Stop(running.unfinished())]
    }

    /// Decides what follows a generation whose ranks have all exited.
    fn conclude(&mut self) -> Vec<Decision> {
        let phase = std::mem::replace(&mut self.phase, Phase::Gathering { since: self.now });
        let Phase::Running(running) = phase else { return vec![] };
        if running.all(|result| matches!(result, NodeResult::Success)) {
            return self.finish(0, "");
        }
        let stopped =
            running.all(|result| matches!(result, NodeResult::Stopped | NodeResult::Success));
        if let Some(signal) = self.stop_signal() {
            return match stopped {
                true => self.finish(EXIT_STOPPED, "stopped on request; all ranks have saved"),
                false => {
                    let code = Exit::Signal(signal).code();
                    self.finish(code, "stopped on request, but not all ranks have saved")
                }
            };
        }
        if stopped && !running.growing && self.leaving_nodes().is_empty() {
            return self.finish(EXIT_STOPPED, "the ranks were asked to stop, and have saved");
        }
        if stopped { self.decide() } else { self.restart(&running) }
    }

    /// Counts a failure, and restarts or gives up.
    fn restart(&mut self, running: &Running) -> Vec<Decision> {
        let failure = running.first_failure();
        if let Some(FirstFailure { code, permanent: true, .. }) = failure {
            // The code for permanent errors is internal; others see a plain error.
            let code = if code == EXIT_PERMANENT { 1 } else { code };
            return self.finish(code, "not restarting: the error is permanent");
        }
        self.restarts += 1;
        let mut decisions = vec![];
        if let Some(FirstFailure { node, slot: Some(slot), code, .. }) = failure {
            decisions.extend(self.count_failure(node, slot, code == EXIT_DEVICE_LOST));
        }
        let limit = self.rules.policy.max_restarts;
        if self.restarts > limit {
            let text = match limit {
                0 => String::new(),
                1 => "giving up after 1 restart without a new checkpoint".into(),
                _ => format!("giving up after {limit} restarts without a new checkpoint"),
            };
            return self.finish(failure.map_or(1, |failure| failure.code), &text);
        }
        decisions.push(Decision::Report(format!(
            "restarting (restart {} of at most {limit} without a new checkpoint)",
            self.restarts
        )));
        decisions.extend(self.decide());
        decisions
    }

    /// Excludes a slot that has failed too often or lost its GPU, if the job can continue without it.
    fn count_failure(&mut self, node: u32, slot: usize, device_lost: bool) -> Option<Decision> {
        let count = self.failures.entry((node, slot)).or_insert(0);
        *count += 1;
        let count = *count;
        let can_spare = (self.rules.fit)(self.available().saturating_sub(1)).is_some();
        // Rank 0 must stay on node 0.
        let last_of_node_zero = node == NODE_ZERO && self.usable_slots(node) == 1;
        if (count < EXCLUDE_AFTER && !device_lost) || !can_spare || last_of_node_zero {
            return None;
        }
        self.excluded.insert((node, slot));
        self.restarts = 1;
        let why = match device_lost {
            true => "it lost its GPU".to_string(),
            false => format!("it failed {EXCLUDE_AFTER} times without a new checkpoint"),
        };
        Some(Decision::Report(format!("excluding slot {slot} of node {node}: {why}")))
    }

    fn finish(&mut self, code: i32, text: &str) -> Vec<Decision> {
        self.phase = Phase::Finished;
        let finish = |node: &u32| Decision::Finish { node: *node, code, text: text.to_string() };
        // Node 0 is last: the coordinator runs in its launcher.
        self.nodes.keys().rev().map(finish).collect()
    }

    fn dismiss(&mut self, node: u32) -> Decision {
        self.nodes.remove(&node);
        let text = "this node has left the job; the other nodes continue".into();
        Decision::Finish { node, code: EXIT_STOPPED, text }
    }

    /// The signal that node 0 received: it stops the job.
    fn stop_signal(&self) -> Option<i32> {
        self.nodes.get(&NODE_ZERO).and_then(|node| node.leaving)
    }

    fn leaving_nodes(&self) -> Vec<u32> {
        let leaving = |(id, node): (&u32, &Node)| node.leaving.is_some().then_some(*id);
        self.nodes.iter().filter_map(leaving).collect()
    }

    /// Usable slots of all nodes that stay.
    fn available(&self) -> usize {
        let staying = self.nodes.iter().filter(|(_, node)| node.leaving.is_none());
        staying.map(|(id, _)| self.usable_slots(*id)).sum()
    }

    fn usable_slots(&self, id: u32) -> usize {
        let slots = self.nodes.get(&id).map_or(0, |node| node.slots);
        (0..slots).filter(|slot| !self.excluded.contains(&(id, *slot))).count()
    }

    fn wanted(&self) -> usize {
        self.rules.ranks.saturating_sub(self.excluded.len())
    }
}

impl Running {
    /// Aborts the members that are still running.
    fn abort(&self) -> Option<Decision> {
        let unfinished = self.unfinished();
        (!unfinished.is_empty()).then_some(Decision::Abort(unfinished))
    }

    fn unfinished(&self) -> Vec<u32> {
        let unfinished = self.members.iter().filter(|(_, member)| member.result.is_none());
        unfinished.map(|(id, _)| *id).collect()
    }

    /// Whether no member was lost and all results satisfy the condition.
    fn all(&self, condition: impl Fn(&NodeResult) -> bool) -> bool {
        !self.lost
            && self.members.values().all(|member| member.result.as_ref().is_some_and(&condition))
    }

    /// A permanent failure if there is one, else the first that was reported. `None` if a member was lost: then the
    /// failures of the others are its consequence.
    fn first_failure(&self) -> Option<FirstFailure> {
        let failures = self.members.iter().filter_map(|(id, member)| match &member.result {
            Some(NodeResult::Failed { local_rank, code, permanent, .. }) => Some(FirstFailure {
                node: *id,
                slot: member.slots.get(*local_rank).copied(),
                code: *code,
                permanent: *permanent,
            }),
            _ => None,
        });
        let first =
            |failure: &FirstFailure| (!failure.permanent, Some(failure.node) != self.first_failed);
        failures.filter(|_| !self.lost).min_by_key(first)
    }
}

#[cfg(test)]
#[path = "coordinator_tests.rs"]
mod tests;
