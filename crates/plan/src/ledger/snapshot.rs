//! State that gradient compression carries from step to step, and the copy of a checkpoint that is written in the
//! background.

use crate::model::Part;
use crate::plan::Plan;
use crate::reduction::RankReductions;

const BYTES: usize = size_of::<f32>();

/// Bytes of the compressors' state. A group of one does not compress.
pub(super) fn compressor_state(plan: &Plan, part: &Part, reductions: &RankReductions) -> usize {
    if reductions.policy.reduce.is_none() {
        return 0;
    }
    let rank = part.mesh.rank(part.coord);
    let runs = reductions.buckets.iter().flat_map(|bucket| &bucket.runs);
    let compressed = runs.filter(|run| part.mesh.members(run.group, rank).len() > 1);
    let elements: usize = compressed.map(|run| run.range.len()).sum();
    BYTES * plan.comm.compression.state_rows() * elements
}

/// Bytes of a snapshot: masters and both moments of the slices that this rank writes, and the compressors' state.
pub(super) fn snapshot(part: &Part, compressor_state: usize) -> usize {
    let written: usize = part.written().iter().map(|slice| slice.here.len()).sum();
    3 * BYTES * written + compressor_state
}
