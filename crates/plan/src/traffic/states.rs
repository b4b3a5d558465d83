//! Collectives on parameters and gradients: the reduction policy of a rank, counted.

use super::{Collective, List, Phase};
use crate::config::Compression;
use crate::mesh::GroupKind;
use crate::model::Part;
use crate::plan::Plan;
use crate::reduction::{PassKind, Point, RankReductions, StateCall, StateOp, wire_calls};

pub(super) struct States<'a> {
    plan: &'a Plan,
    part: &'a Part,
    reductions: &'a RankReductions,
    /// Compression of this step's gradients.
    compression: Compression,
}

impl<'a> States<'a> {
    pub fn new(
        plan: &'a Plan,
        part: &'a Part,
        reductions: &'a RankReductions,
        compression: Compression,
    ) -> States<'a> {
        States { plan, part, reductions, compression }
    }

    /// Adds the collectives of one call.
    pub fn add(&self, list: &mut List, call: &StateCall) {
        list.phase = phase(call);
        let sequence = self.plan.layout.sequence;
        let collectives = self.reductions.collectives(self.part, sequence, call.op);
        for one in collectives {
            let is_reduction = matches!(call.op, StateOp::Reduce { .. });
            let is_copies = one.collective == Collective::AllReduce
                && self.reductions.policy.shards_gradients();
            match call.op {
                StateOp::Gather { .. } => list.add(
                    one.group,
                    one.collective,
                    one.len,
                    self.plan.precision.compute.bytes(),
                ),
                // The all-reduce across copies of a shard is never compressed.
                _ if is_reduction && !is_copies => {
                    self.reduce(list, one.collective, one.group, one.len)
                }
                _ => list.add(one.group, one.collective, one.len, self.gradient_bytes()),
            }
        }
    }

    /// A reduction over replicas, in the form in which gradients are sent.
    fn reduce(&self, list: &mut List, collective: Collective, kind: GroupKind, len: usize) {
        let (ranks, numbers) = (list.size(kind), (len, self.gradient_bytes()));
        for call in wire_calls(self.compression, collective, ranks, numbers) {
            list.add(kind, call.collective, call.count, call.width);
        }
    }

    fn gradient_bytes(&self) -> usize {
        self.plan.precision.gradients.bytes()
    }
}

fn phase(call: &StateCall) -> Phase {
    match (call.point, call.op) {
        (Point::Before { pass: PassKind::Forward, .. }, _) => Phase::Forward,
        (Point::AfterOptimizer, _) | (_, StateOp::Sum(_)) => Phase::Optimizer,
        _ => Phase::Backward,
    }
}
