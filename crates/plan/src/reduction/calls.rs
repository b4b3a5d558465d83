//! The policy of a rank written out for one step: every gather, release and reduction, in the order in which the rank
//! starts them.

use super::buckets::gather_group;
use super::{Gather, RankReductions, SharedSum};
use crate::mesh::GroupKind;
use crate::model::Part;
use crate::passes::{PassEvent, passes};
use crate::plan::Plan;
use lockstep_types::Collective;

/// A gather, release or reduction of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateCall {
    pub point: Point,
    pub op: StateOp,
    /// Runs while the rank computes.
    pub overlapped: bool,
}

/// A point of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Point {
    Before { pass: PassKind, block: usize, micro: usize },
    After { pass: PassKind, block: usize, micro: usize },
    EndOfPasses,
    AfterOptimizer,
}

/// A pass over one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PassKind {
    Forward,
    /// The head's fused forward and backward pass.
    Loss,
    Backward,
    /// Deferred weight gradients.
    Weights,
    /// A forward pass outside of a step.
    Inference,
}

/// A change of a rank's parameters or gradients that is not compute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StateOp {
    /// All-gathers the parameters of a block.
    Gather { block: usize },
    /// Frees the gathered parameters of a block.
    Release { block: usize },
    /// Reduces a bucket over the replicas. With sharded gradients the bucket is freed, and after the `last` micro-batch
    /// the shard is all-reduced across its copies.
    Reduce { bucket: usize, last: bool },
    /// All-reduces what ranks of another axis each have a part of.
    Sum(SharedSum),
}

/// A collective on a rank's parameters or gradients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateCollective {
    pub collective: Collective,
    pub group: GroupKind,
    /// Elements before they are cut.
    pub len: usize,
}

/// A pass over a block, or what the policy does around it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    Pass(PassEvent),
    State(StateCall),
}

/// Everything that a rank does in a step. `compressed` says whether its gradients are.
pub(crate) fn events(
    plan: &Plan,
    part: &Part,
    reductions: &RankReductions,
    compressed: bool,
) -> Vec<Event> {
    let mut walk = Walk {
        reductions,
        gathered: vec![false; part.blocks.len()],
        complete: vec![0; reductions.buckets.len()],
        passes: vec![0; part.blocks.len()],
        waiting: Vec::new(),
        events: Vec::new(),
    };
    for (micro, event) in passes(plan, part) {
        walk.pass(micro, event);
    }
    walk.end(compressed);
    walk.events
}

impl RankReductions {
    /// Every gather, release and reduction of a rank in a step, in order. `compressed` says whether the step's gradients
    /// are.
    pub fn calls(&self, plan: &Plan, part: &Part, compressed: bool) -> Vec<StateCall> {
        let state = |event| match event {
            Event::State(call) => Some(call),
            Event::Pass(_) => None,
        };
        events(plan, part, self, compressed).into_iter().filter_map(state).collect()
    }

    /// The collectives of an operation, in order. Those of groups of one rank are copies.
    pub fn collectives(&self, part: &Part, sequence: bool, op: StateOp) -> Vec<StateCollective> {
        match op {
            StateOp::Gather { block } => part.shards[block]
                .iter()
                .map(|shard| StateCollective {
                    collective: Collective::AllGather,
                    group: gather_group(&shard.unit),
                    len: shard.unit.range.len(),
                })
                .collect(),
            StateOp::Release { .. } => Vec::new(),
            StateOp::Reduce { bucket, last } => self.reduce_collectives(bucket, last),
            StateOp::Sum(sum) => vec![StateCollective {
                collective: Collective::AllReduce,
                group: sum.group(),
                len: sum.len(part, sequence),
            }],
        }
    }

    fn reduce_collectives(&self, bucket: usize, last: bool) -> Vec<StateCollective> {
        let Some(reduce) = self.policy.reduce else { return Vec::new() };
        let mut all = Vec::new();
        for run in &self.buckets[bucket].runs {
            let (collective, group, len) = (reduce.collective, run.group, run.range.len());
            all.push(StateCollective { collective, group, len });
            if let Some((own, copies)) = run.shard.as_ref().filter(|_| last) {
                let (collective, group, len) = (Collective::AllReduce, *copies, own.len());
                all.push(StateCollective { collective, group, len });
            }
        }
        all
    }
}

struct Walk<'a> {
    reductions: &'a RankReductions,
    /// By block, whether it is gathered or on its way.
    gathered: Vec<bool>,
    /// By bucket, blocks whose gradient is complete.
    complete: Vec<usize>,
    /// By block, micro-batches whose gradient is complete.
    passes: Vec<usize>,
    /// Buckets that wait for the end of the passes.
    waiting: Vec<usize>,
    events: Vec<Event>,
}

impl Walk<'_> {
    fn pass(&mut self, micro: usize, event: PassEvent) {
        let (pass, block) = match event {
            PassEvent::Embed { block } | PassEvent::Forward { block } => (PassKind::Forward, block),
            PassEvent::LossAndBackward { block, .. } => (PassKind::Loss, block),
            PassEvent::Backward { block, .. } | PassEvent::EmbedBackward { block } => {
                (PassKind::Backward, block)
            }
            PassEvent::Weights { block } => (PassKind::Weights, block),
            PassEvent::Received { .. } | PassEvent::Sent { .. } => {
                return self.events.push(Event::Pass(event));
            }
        };
        let before = Point::Before { pass, block, micro };
        let after = Point::After { pass, block, micro };
        match event {
            PassEvent::EmbedBackward { .. } | PassEvent::Weights { .. } => {}
            PassEvent::LossAndBackward { table, .. } => {
                self.gather(before, pass, block);
                table.into_iter().for_each(|table| self.gather(before, pass, table));
            }
            _ => self.gather(before, pass, block),
        }
        self.events.push(Event::Pass(event));
        match event {
            PassEvent::LossAndBackward { table, .. } => {
                self.release(after, pass, block);
                table.into_iter().for_each(|table| self.release(after, pass, table));
                self.block_complete(after, block);
            }
            PassEvent::Backward { deferred, .. } => {
                self.release(after, pass, block);
                if !deferred {
                    self.block_complete(after, block);
                }
            }
            PassEvent::EmbedBackward { .. } => {
                self.release(after, pass, block);
                self.block_complete(after, block);
            }
            PassEvent::Weights { .. } => self.block_complete(after, block),
            _ => self.release(after, pass, block),
        }
    }

    fn gather(&mut self, point: Point, pass: PassKind, block: usize) {
        if !self.reductions.policy.gather.shards_parameters() {
            return;
        }
        if !std::mem::replace(&mut self.gathered[block], true) {
            self.state(point, StateOp::Gather { block }, false);
        }
        if let Some(next) = self.reductions.prefetch(block, pass)
            && !std::mem::replace(&mut self.gathered[next], true)
        {
            self.state(point, StateOp::Gather { block: next }, true);
        }
    }

    fn release(&mut self, point: Point, pass: PassKind, block: usize) {
        if self.reductions.policy.gather.releases_after(pass) && self.gathered[block] {
            self.gathered[block] = false;
            self.state(point, StateOp::Release { block }, false);
        }
    }

    /// A micro-batch's gradient of a block is complete.
    fn block_complete(&mut self, point: Point, block: usize) {
        let RankReductions { policy, buckets, .. } = self.reductions;
        self.passes[block] += 1;
        let last = self.passes[block] == policy.micro_batches;
        if !policy.reduces(last) {
            return;
        }
        let bucket = buckets.iter().position(|bucket| bucket.blocks.contains(&block));
        let bucket = bucket.expect("every block is in a bucket");
        self.complete[bucket] += 1;
        if self.complete[bucket] < buckets[bucket].blocks.len() {
            return;
        }
        self.complete[bucket] = 0;
        match policy.reduces_at_end() {
            true => self.waiting.push(bucket),
            false => self.state(point, StateOp::Reduce { bucket, last }, policy.overlap),
        }
    }

    fn end(&mut self, compressed: bool) {
        let point = Point::EndOfPasses;
        for block in 0..self.gathered.len() {
            if std::mem::take(&mut self.gathered[block]) {
                self.state(point, StateOp::Release { block }, false);
            }
        }
        for bucket in std::mem::take(&mut self.waiting) {
            self.state(point, StateOp::Reduce { bucket, last: true }, false);
        }
        for sum in &self.reductions.shared {
            if *sum != SharedSum::Compressed || compressed {
                self.state(point, StateOp::Sum(*sum), false);
            }
        }
        if self.reductions.policy.gather == Gather::AfterOptimizer {
            for block in 0..self.gathered.len() {
                self.state(Point::AfterOptimizer, StateOp::Gather { block }, false);
            }
        }
    }

    fn state(&mut self, point: Point, op: StateOp, overlapped: bool) {
        self.events.push(Event::State(StateCall { point, op, overlapped }));
    }
}
