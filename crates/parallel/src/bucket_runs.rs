//! The runs of a bucket that are reduced by one collective each.

use std::ops::Range;

use crate::Gradients;

/// Runs of an all-reduced bucket, and whether they hold experts' parameters. Neighbouring units that are reduced over
/// the same group form one run.
pub(crate) fn joined_units(gradients: &Gradients, bucket: usize) -> Vec<(Range<usize>, bool)> {
    let mut runs: Vec<(Range<usize>, bool)> = Vec::new();
    for &block in &gradients.buckets[bucket].blocks {
        let start = gradients.start_of(block);
        for piece in &gradients.shards[block] {
            let range = start + piece.unit.range.start..start + piece.unit.range.end;
            match runs.last_mut() {
                Some((run, expert)) if *expert == piece.unit.expert && run.end == range.start => {
                    run.end = range.end
                }
                _ => runs.push((range, piece.unit.expert)),
            }
        }
    }
    runs
}

/// For each collective of a bucket, the blocks that it covers and their ranges, counted from the start of each block.
pub(crate) fn block_runs(gradients: &Gradients, bucket: usize) -> Vec<Vec<(usize, Range<usize>)>> {
    let blocks = &gradients.buckets[bucket].blocks;
    if gradients.stage > 0 {
        let block = blocks[0];
        let units = gradients.shards[block].iter();
        return units.map(|piece| vec![(block, piece.unit.range.clone())]).collect();
    }
    let of_block = |run: &Range<usize>, block: usize| {
        let (start, len) = (gradients.start_of(block), gradients.len_of(block));
        let (from, to) = (run.start.max(start), run.end.min(start + len));
        (from < to).then(|| (block, from - start..to - start))
    };
    let of_run = |(run, _): (Range<usize>, bool)| {
        blocks.iter().filter_map(|block| of_block(&run, *block)).collect()
    };
    joined_units(gradients, bucket).into_iter().map(of_run).collect()
}
