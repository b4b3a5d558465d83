//! State of compressed reductions by block, for checkpoints: the residuals and the mean squares that each rank's
//! compressors carry from step to step. Empty where gradients are not compressed.

use std::ops::Range;

use lockstep_kernels::Device;

use crate::bucket_runs::block_runs;
use crate::compress::Memory;
use crate::{Gradients, Groups, Reduction};

impl Reduction {
    /// The compressors' state: block, range of its flat buffer, and values.
    pub fn remembered<'a>(
        &'a self,
        gradients: &'a Gradients,
        what: Memory,
    ) -> impl Iterator<Item = (usize, Range<usize>, &'a [f32])> {
        let buckets = self.compressors.iter().enumerate();
        buckets
            .flat_map(|(bucket, compressors)| {
                block_runs(gradients, bucket).into_iter().zip(compressors)
            })
            .flat_map(move |(runs, compressor)| {
                let values = compressor.remembered(what);
                runs.into_iter().scan(0, move |at, (block, run)| {
                    // A group of one rank compresses nothing and has no state.
                    let part = values.get(*at..*at + run.len())?;
                    *at += run.len();
                    Some((block, run, part))
                })
            })
    }

    /// Loads the compressors' state: `fill` is called for each block range that has some.
    pub fn remember(
        &mut self,
        device: &Device,
        groups: &Groups,
        gradients: &Gradients,
        what: Memory,
        mut fill: impl FnMut(usize, Range<usize>, &mut [f32]),
    ) {
        self.prepare(device, groups, gradients);
        for (bucket, compressors) in self.compressors.iter_mut().enumerate() {
            for (runs, compressor) in block_runs(gradients, bucket).into_iter().zip(compressors) {
                let mut rest = compressor.remembered_mut(what);
                for (block, run) in runs {
                    let Some((values, later)) = rest.split_at_mut_checked(run.len()) else { break };
                    fill(block, run, values);
                    rest = later;
                }
            }
        }
    }
}
