//! State of compressed reductions by block, for checkpoints: the residuals and the mean squares that each rank's
//! compressors carry from step to step. Empty where gradients are not compressed.

use std::ops::Range;

use crate::Reduction;
use crate::compress::Memory;

impl Reduction {
    /// The compressors' state: block, range of its flat buffer, and values.
    pub fn remembered(&self, what: Memory) -> impl Iterator<Item = (usize, Range<usize>, &[f32])> {
        let compressors = self.compressors.iter().flatten();
        self.block_ranges.iter().flatten().zip(compressors).flat_map(move |(ranges, compressor)| {
            let values = compressor.remembered(what);
            ranges.iter().scan(0, move |at, (block, range)| {
                // A group of one rank compresses nothing and has no state.
                let part = values.get(*at..*at + range.len())?;
                *at += range.len();
                Some((*block, range.clone(), part))
            })
        })
    }

    /// Loads the compressors' state: `fill` is called for each block range that has some.
    pub fn remember(
        &mut self,
        what: Memory,
        mut fill: impl FnMut(usize, Range<usize>, &mut [f32]),
    ) {
        let compressors = self.compressors.iter_mut().flatten();
        for (ranges, compressor) in self.block_ranges.iter().flatten().zip(compressors) {
            let mut rest = compressor.remembered_mut(what);
            for (block, range) in ranges {
                let Some((values, later)) = rest.split_at_mut_checked(range.len()) else { break };
                fill(*block, range.clone(), values);
                rest = later;
            }
        }
    }
}
