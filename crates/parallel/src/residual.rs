//! State of compressed reductions by block, for checkpoints: the residuals and the mean squares that each rank's
//! compressors carry from step to step. Empty where gradients are not compressed.

use std::ops::Range;

use lockstep_kernels::{Device, View};

use crate::Reduction;
use crate::compress::CompressorState;

impl Reduction {
    /// The compressors' state: block, range of its flat buffer, and values.
    pub fn compressor_state(
        &self,
        kind: CompressorState,
    ) -> impl Iterator<Item = (usize, Range<usize>, View<'_>)> {
        let compressors = self.compressors.iter().flatten();
        self.block_ranges.iter().flatten().zip(compressors).flat_map(move |(ranges, compressor)| {
            let values = compressor.state(kind);
            ranges.iter().scan(0, move |at, (block, range)| {
                // A group of one rank compresses nothing and has no state.
                let part = *at..*at + range.len();
                *at = part.end;
                (part.end <= values.len()).then(|| (*block, range.clone(), values.part(part)))
            })
        })
    }

    /// Loads the compressors' state: `fill` is called for each block range that has some.
    pub fn load_compressor_state(
        &mut self,
        device: &Device,
        kind: CompressorState,
        mut fill: impl FnMut(usize, Range<usize>, &mut [f32]),
    ) {
        let mut values = Vec::new();
        let compressors = self.compressors.iter_mut().flatten();
        for (ranges, compressor) in self.block_ranges.iter().flatten().zip(compressors) {
            let mut rest = compressor.state_mut(kind);
            for (block, range) in ranges {
                if range.len() > rest.len() {
                    break;
                }
                values.resize(range.len(), 0.0);
                fill(*block, range.clone(), &mut values);
                let (state, later) = rest.split_at(range.len());
                device.write(state, &values);
                rest = later;
            }
        }
    }
}
