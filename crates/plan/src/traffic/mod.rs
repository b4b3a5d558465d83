//! What a rank exchanges in one optimizer step, before any rank is started: every collective and every message,
//! in the order of `parallel` and `model`, alike ones counted together. How many bytes each comes to on a wire
//! is the algorithm's to say, in `comm`; nothing is sent here.
//!
//! | group | forward | backward | optimizer |
//! |---|---|---|---|
//! | tensor | sums of halves; with sequence parallelism gathers and scatters, or rows from rank to rank | the same, logits' maxima and sums | norms, with sequence parallelism |
//! | keys, ends | | | gradients that several have parts of |
//! | context | keys round a ring, heads to neighbours, loads of experts | once more, and their gradients | |
//! | expert | counts, rows and back | rows, weights and back | |
//! | pipe | the stream | its gradient | |
//! | gather | blocks (ZeRO-3) | blocks (ZeRO-3) | what was stepped (ZeRO-1, 2) |
//! | shard, copies | | sums of gradients | |
//! | all ranks | | | loss and norm |
//!
//! What is recomputed is exchanged again, and counts as backward.

mod passes;
mod states;

pub use lockstep_types::Collective;
pub use passes::FEW_ROWS;

use crate::mesh::{GroupKind, Mesh};
use crate::passes::{Moment, moments};
use crate::plan::Plan;
use passes::Passes;
use serde::{Deserialize, Serialize};
use states::States;

/// Something that a rank takes part in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Exchange {
    /// None: all ranks.
    pub kind: Option<GroupKind>,
    /// Who takes part: of the context, runs of so many neighbours, or as many that are as far apart.
    pub members: usize,
    pub collective: Collective,
    /// Elements: of an all-reduce what everybody has, of the others what would be together without a cut.
    pub count: usize,
    /// Bytes of an element.
    pub width: usize,
    pub phase: Phase,
    /// In one optimizer step.
    pub times: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Forward,
    Backward,
    Optimizer,
}

/// All that a rank exchanges in one optimizer step, when a run is past its warm-ups. Gradients are counted in one bucket where the plan leaves
/// the size of buckets to the ranks.
///
/// ```
/// use lockstep_plan::{GroupKind, Collective, Config, Plan, Environment, traffic};
///
/// let sets = ["layout.data=2", "layout.zero=2", "model.vocab=512"].map(String::from);
/// let plan = Plan::resolve(&Config::parse("", &sets), &Environment::one_host(2, 1)).unwrap();
/// let spread: usize = traffic(&plan, 0)
///     .iter()
///     .filter(|exchange| exchange.group == Some(GroupKind::Gather))
///     .map(|exchange| exchange.count * exchange.times)
///     .sum();
/// assert_eq!(spread, plan.model.param_count());
/// ```
pub fn traffic(plan: &Plan, rank: usize) -> Vec<Exchange> {
    traffic_of_step(plan, rank, usize::MAX)
}

/// The same of one step, counted from 1: gradients that are compressed may travel whole in the first.
pub fn traffic_of_step(plan: &Plan, rank: usize, step: usize) -> Vec<Exchange> {
    let part = plan.part(rank);
    let mut list = List::new(&part.mesh, rank);
    let passes = Passes::new(plan, &part);
    let mut states = States::new(plan, &part, plan.compression(step));
    for moment in moments(plan, &part) {
        let forward = matches!(
            moment,
            Moment::Embed { .. } | Moment::Forward { .. } | Moment::Passed { forward: true }
        );
        list.phase = if forward { Phase::Forward } else { Phase::Backward };
        states.gather(&mut list, moment);
        match moment {
            Moment::Embed { .. } => passes.embed(&mut list),
            Moment::Forward { .. } => passes.forward(&mut list),
            Moment::Turn { .. } => passes.turn(&mut list),
            Moment::Backward { .. } => passes.backward(&mut list),
            Moment::EmbedBackward { .. } => passes.embed_backward(&mut list),
            Moment::Passed { .. } => passes.pass_on(&mut list),
            Moment::Received { .. } | Moment::Weights { .. } => {}
        }
    }
    list.phase = Phase::Backward;
    states.sums(&mut list);
    list.phase = Phase::Optimizer;
    states.parts(&mut list);
    // Loss, auxiliary loss, squares of the gradient and three counts of damaged samples, in f64.
    list.add_among(None, plan.ranks, Collective::AllReduce, 6, 8);
    states.spread(&mut list);
    list.exchanges
}

/// Exchanges so far.
struct List {
    /// Of the rank's groups.
    sizes: [usize; GroupKind::ALL.len()],
    phase: Phase,
    exchanges: Vec<Exchange>,
}

impl List {
    fn new(mesh: &Mesh, rank: usize) -> List {
        let sizes = GroupKind::ALL.map(|kind| mesh.members(kind, rank).len());
        List { sizes, phase: Phase::Forward, exchanges: Vec::new() }
    }

    fn size(&self, kind: GroupKind) -> usize {
        self.sizes[kind as usize]
    }

    fn add(&mut self, kind: GroupKind, collective: Collective, count: usize, width: usize) {
        self.add_among(Some(kind), self.size(kind), collective, count, width);
    }

    /// A group of one exchanges nothing.
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
        let new = Exchange { kind, members, collective, count, width, phase, times: 1 };
        let alike = |old: &&mut Exchange| Exchange { times: 1, ..**old } == new;
        match self.exchanges.iter_mut().find(alike) {
            Some(old) => old.times += 1,
            None => self.exchanges.push(new),
        }
    }
}
