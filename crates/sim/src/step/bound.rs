//! Lower bounds of the step time without walking the schedule, for the search: it evaluates a million candidates and
//! walks only those that may be among the best.

use super::after::After;
use super::inside::Inside;
use super::{pass, send};
use crate::case::Case;
use crate::comm::Flows;
use crate::compute::{Passes, embed, head, layer};

/// A long step is extrapolated from its first micro-batches, which may be up to 1% too fast.
const EXTRAPOLATED: f64 = 0.99;

/// Cost of each kind of block for one micro-batch: the same for every number of stages, schedule and placement.
#[derive(Clone, Copy)]
pub(crate) struct Blocks {
    layer: Passes,
    /// The dense layers at the start of a mixture of experts.
    lead: Passes,
    embed: Passes,
    head: Passes,
}

impl Blocks {
    pub fn of(case: &Case) -> Blocks {
        let lead = case.lead().map_or(Passes::default(), |lead| layer(&lead));
        Blocks { layer: layer(case), lead, embed: embed(case), head: head(case) }
    }

    pub fn stage(&self, case: &Case, stage: usize) -> Passes {
        let [layers, leading] = case.kinds(stage).map(|layers| layers as f64);
        let mut passes = self.layer * layers + self.lead * leading;
        if stage == 0 {
            passes = passes + self.embed;
        }
        if stage + 1 == case.stages() {
            passes = passes + self.head;
        }
        passes
    }
}

/// A lower bound of the step time in seconds: for every rank, the passes before its first one, its own, and those after
/// its last; then the reductions and the optimizer step of the first rank.
pub(crate) fn bound(case: &Case, blocks: &Blocks) -> f64 {
    let after = After::first(case, &mut Flows::new(case.cluster));
    let exposed = |backward: f64| after.exposed(case, 0, backward, 0.0);
    // Updates on the host overlap with the next forward pass.
    let step = if case.offloads().optimizer() { 0.0 } else { after.step(0) };
    // On one device the other ranks, which may have less to update, take no longer than all together.
    let step =
        if case.cluster.engine.shares_accelerator() { step / case.pipe() as f64 } else { step };
    EXTRAPOLATED * (until_reduced(case, blocks, exposed) + step + after.gather(0))
}

/// The bound without what follows the passes, valid for every ZeRO level.
pub(crate) fn passes_bound(case: &Case, blocks: &Blocks) -> f64 {
    debug_assert_eq!(case.layout().zero, 0, "the ZeRO level is chosen later");
    EXTRAPOLATED * until_reduced(case, blocks, |_| 0.0)
}

/// Seconds until gradients are reduced. `exposed` is the part of the reductions that follows a backward pass of the
/// first rank.
fn until_reduced(case: &Case, blocks: &Blocks, exposed: impl Fn(f64) -> f64) -> f64 {
    let mut flows = Flows::new(case.cluster);
    let inside = Inside::new(case, &mut flows);
    let send = send(case, &mut flows);
    let (pipe, micros) = (case.pipe(), case.micros() as f64);
    // No other stage waits for deferred weight gradients, so a rank may end with them.
    let splits = pipe > 1 && case.layout().schedule.splits();
    let mut busy = vec![0.0; pipe];
    let mut first = vec![(0.0, 0.0); pipe]; // the first chunk's forward and backward pass
    let mut backward = 0.0; // the first rank's
    for stage in 0..case.stages() {
        let passes = blocks.stage(case, stage);
        let waits = inside.waits(case, &passes, stage);
        let there = pass(case, passes.forward, waits.forward, 1.0).seconds;
        let back = pass(case, passes.again + passes.input, waits.input, 1.0).seconds;
        let last = pass(case, passes.weights, 0.0, 1.0).seconds;
        let rank = stage % pipe;
        busy[rank] += micros * (there + back + last);
        backward += if rank == 0 { back + last } else { 0.0 };
        if stage < pipe {
            first[rank] = (there, if splits { back } else { back + last });
        }
    }
    let exposed = exposed(backward);
    if case.cluster.engine.shares_accelerator() {
        return busy.iter().sum::<f64>() / pipe as f64 + exposed;
    }
    let mut until = busy[0] + exposed;
    let (mut before, mut behind) = (0.0, 0.0);
    for rank in 0..pipe {
        let own = before + busy[rank];
        until = until.max(if splits { own } else { own + behind + exposed });
        before += first[rank].0 + send;
        behind += first[rank].1 + send;
    }
    until
}

/// A lower bound for every schedule, number of chunks and ZeRO level: all passes of all stages, distributed evenly.
pub(crate) fn compute_bound(case: &Case, blocks: &Blocks) -> f64 {
    debug_assert_eq!(case.layout().zero, 0, "the ZeRO level is chosen later");
    let inside = Inside::new(case, &mut Flows::new(case.cluster));
    let leading = case.shape().lead.map_or(0, |lead| lead.layers);
    let kinds = [case.shape().layers - leading, leading];
    let [layers, first] = kinds.map(|layers| layers as f64);
    let whole = blocks.layer * layers + blocks.lead * first + blocks.embed + blocks.head;
    let waits = inside.waits_of(case, &whole, kinds, 0.0);
    let seconds = pass(case, whole.forward, waits.forward, 1.0).seconds
        + pass(case, whole.again + whole.input, waits.input, 1.0).seconds
        + pass(case, whole.weights, 0.0, 1.0).seconds;
    EXTRAPOLATED * seconds * case.micros() as f64 / case.pipe() as f64
}
