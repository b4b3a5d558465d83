//! The passes of one rank in an optimizer step, block by block and in order: its list of the schedule, with the blocks
//! of each stage in the order of `model`. Memory and traffic are derived from it; nothing is computed here.

use std::ops::Range;

use crate::model::Part;
use crate::plan::Plan;
use crate::schedule::Act;

/// A pass over a block, or a message between stages. Blocks are numbered as on the rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PassEvent {
    /// A message of another stage, an activation or a gradient, has arrived; perhaps before it is used.
    Received { forward: bool },
    /// The embedding's forward pass.
    Embed { block: usize },
    /// A layer's forward pass.
    Forward { block: usize },
    /// The head's fused pass. `table` is the block whose token table is the output projection, if that is another one.
    LossAndBackward { block: usize, table: Option<usize> },
    /// A layer's backward pass, with its weight gradients unless they are `deferred`.
    Backward { block: usize, deferred: bool },
    /// A layer's deferred weight gradients.
    Weights { block: usize },
    /// The embedding's backward pass.
    EmbedBackward { block: usize },
    /// The residual stream or its gradient is sent to another stage.
    Sent { forward: bool },
}

/// The passes of the rank that holds this part, each with its micro-batch.
pub(crate) fn passes(plan: &Plan, part: &Part) -> Vec<(usize, PassEvent)> {
    let schedule = plan.schedule();
    let mut events = Vec::new();
    for step in schedule.steps(part.coord.pipe) {
        let (action, micro) = (step.action, step.action.micro);
        let mut add = |event| events.push((micro, event));
        for message in &step.receives {
            add(PassEvent::Received { forward: message.is_activation() });
        }
        let stage = part.stages[action.stage / schedule.ranks].clone();
        match action.act {
            Act::Forward => forward(part, stage, &mut add),
            Act::Backward => backward(part, stage, false, &mut add),
            Act::Input => backward(part, stage, true, &mut add),
            Act::Weights => {
                layers(part, stage).rev().for_each(|block| add(PassEvent::Weights { block }));
            }
        }
        if step.sends_to.is_some() {
            add(PassEvent::Sent { forward: action.act == Act::Forward });
        }
    }
    events
}

fn forward(part: &Part, stage: Range<usize>, add: &mut impl FnMut(PassEvent)) {
    if part.is_first(stage.start) {
        add(PassEvent::Embed { block: stage.start });
    }
    layers(part, stage).for_each(|block| add(PassEvent::Forward { block }));
}

fn backward(part: &Part, stage: Range<usize>, deferred: bool, add: &mut impl FnMut(PassEvent)) {
    let (first, last) = (stage.start, stage.end - 1);
    if part.is_last(last) {
        let table = part.shared[last].as_ref().map(|shared| shared.block);
        add(PassEvent::LossAndBackward { block: last, table });
    }
    layers(part, stage).rev().for_each(|block| add(PassEvent::Backward { block, deferred }));
    if part.is_first(first) {
        add(PassEvent::EmbedBackward { block: first });
    }
}

/// The layers of a stage: its blocks without embedding and head.
fn layers(part: &Part, stage: Range<usize>) -> Range<usize> {
    let first = stage.start + usize::from(part.is_first(stage.start));
    first..stage.end - usize::from(part.is_last(stage.end - 1))
}
