//! The communication of a rank in one optimizer step, before any rank is started: every collective and every message,
//! equal ones counted together. The bytes that each sends depend on the algorithm, which is chosen in `comm`.
//!
//! | group | forward | backward | optimizer |
//! |---|---|---|---|
//! | tensor | sums of halves; with sequence parallelism gathers and scatters, or rows from rank to rank | the same, maxima and sums of logits | norms, with sequence parallelism |
//! | keys, ends | | | gradients of which several ranks have a part |
//! | context | keys around a ring, heads to neighbours, loads of experts | once more, and their gradients | |
//! | expert | counts, rows and back | rows, weights and back | |
//! | pipe | the residual stream | its gradient | |
//! | gather | blocks (ZeRO-3) | blocks (ZeRO-3) | updated parameters (ZeRO-1, 2) |
//! | shard, copies | | gradient reductions | |
//! | all ranks | | | loss and norm |
//!
//! Communication of recomputed passes counts as backward.

mod passes;
mod states;

pub use lockstep_types::Collective;

use crate::mesh::{GroupKind, Mesh};
use crate::passes::PassEvent;
use crate::plan::Plan;
use crate::reduction::{Event, RankReductions, events};
use passes::Passes;
use serde::{Deserialize, Serialize};
use states::States;

/// A collective or message of a rank, repeated several times per step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PlannedCall {
    /// The group; none is all ranks.
    pub kind: Option<GroupKind>,
    /// Ranks that take part. In the context group these may be a part of it: neighbours that exchange heads, or a ring.
    pub members: usize,
    pub collective: Collective,
    /// Elements before they are cut: those of an all-reduce on one rank, otherwise those of all ranks together.
    pub count: usize,
    /// Bytes per element.
    pub width: usize,
    pub phase: Phase,
    /// Calls in one optimizer step.
    pub times: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Forward,
    Backward,
    Optimizer,
}

/// The communication of a rank in one optimizer step after the compression warm-up.
///
/// ```
/// use lockstep_plan::{GroupKind, Collective, Config, Plan, Environment, traffic};
///
/// let sets = ["layout.data=2", "layout.zero=2", "model.vocab=512"].map(String::from);
/// let plan = Plan::resolve(&Config::parse("", &sets), &Environment::one_host(2, 1)).unwrap();
/// let gathered: usize = traffic(&plan, 0)
///     .iter()
///     .filter(|call| call.kind == Some(GroupKind::Gather))
///     .map(|call| call.count * call.times)
///     .sum();
/// assert_eq!(gathered, plan.model.param_count());
/// ```
pub fn traffic(plan: &Plan, rank: usize) -> Vec<PlannedCall> {
    traffic_of_step(plan, rank, usize::MAX)
}

/// The communication of a rank in one step, counted from 1: during the compression warm-up gradients are sent
/// uncompressed.
pub fn traffic_of_step(plan: &Plan, rank: usize, step: usize) -> Vec<PlannedCall> {
    let part = plan.part(rank);
    let reductions = RankReductions::of(plan, &part);
    let compression = plan.compression(step);
    let mut list = List::new(&part.mesh, rank);
    let passes = Passes::new(plan, &part);
    let states = States::new(plan, &part, &reductions, compression);
    for event in events(plan, &part, &reductions, compression.depends_on_neighbours()) {
        match event {
            Event::State(call) => states.add(&mut list, &call),
            Event::Pass(pass) => {
                list.phase = phase(pass);
                passes.add(&mut list, pass);
            }
        }
    }
    list.phase = Phase::Optimizer;
    // Loss, auxiliary loss, squares of the gradient, three counts of corrupt samples and the loads of experts, in f64.
    list.add_among(None, plan.ranks, Collective::AllReduce, 6 + plan.model.load_sums(), 8);
    list.calls
}

fn phase(pass: PassEvent) -> Phase {
    match pass {
        PassEvent::Embed { .. } | PassEvent::Forward { .. } | PassEvent::Sent { forward: true } => {
            Phase::Forward
        }
        _ => Phase::Backward,
    }
}

/// Communication so far.
struct List {
    /// Sizes of the rank's groups.
    sizes: [usize; GroupKind::ALL.len()],
    phase: Phase,
    calls: Vec<PlannedCall>,
}

impl List {
    fn new(mesh: &Mesh, rank: usize) -> List {
        let sizes = GroupKind::ALL.map(|kind| mesh.members(kind, rank).len());
        List { sizes, phase: Phase::Forward, calls: Vec::new() }
    }

    fn size(&self, kind: GroupKind) -> usize {
        self.sizes[kind as usize]
    }

    fn add(&mut self, kind: GroupKind, collective: Collective, count: usize, width: usize) {
        self.add_among(Some(kind), self.size(kind), collective, count, width);
    }

    /// A group of one does not communicate.
    fn add_among(
        &mut self,
        kind: Option<GroupKind>,
        members: usize,
        collective: Collective,
        count: usize,
        width: usize,
    ) {
        if members == 1 {
            return;
        }
        let phase = self.phase;
        let new = PlannedCall { kind, members, collective, count, width, phase, times: 1 };
        let is_equal = |old: &&mut PlannedCall| PlannedCall { times: 1, ..**old } == new;
        match self.calls.iter_mut().find(is_equal) {
            Some(old) => old.times += 1,
            None => self.calls.push(new),
        }
    }
}
