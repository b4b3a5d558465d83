//! Blocks that ZeRO-3 has gathered at once.

use super::overlaps;
use crate::model::Part;
use crate::passes::Moment;
use crate::plan::Plan;

/// Bytes of gathered parameters at most.
pub(super) fn peak(plan: &Plan, part: &Part, moments: &[Moment]) -> usize {
    if plan.layout.zero < 3 {
        return 0;
    }
    let bytes = plan.precision.compute.bytes();
    let size = |block: usize| bytes * part.blocks[block].len();
    if plan.layout.keep_gathered {
        return (0..part.blocks.len()).map(size).sum();
    }
    let ahead = |block: usize, next: Option<usize>| {
        let stage = part.stages.iter().find(|stage| stage.contains(&block));
        let there = |next: &usize| stage.is_some_and(|stage| stage.contains(next));
        next.filter(|_| overlaps(plan)).filter(there).map_or(0, size)
    };
    let at = |moment: &Moment| match *moment {
        Moment::Embed { block } | Moment::Forward { block } => {
            size(block) + ahead(block, Some(block + 1))
        }
        Moment::Turn { block, table } => size(block) + table.map_or(0, size),
        Moment::Backward { block, .. } => size(block) + ahead(block, block.checked_sub(1)),
        _ => 0,
    };
    // What was gathered ahead for the head waits for it, in a pipeline while other passes go on.
    let waits = overlaps(plan) && part.has_head() && plan.layout.pipe > 1;
    let head = if waits { size(part.blocks.len() - 1) } else { 0 };
    moments.iter().map(at).max().unwrap_or(0) + head
}
