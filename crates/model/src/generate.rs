//! Text generation, token by token, with a cache of keys and values.

use lockstep_kernels::{Device, Dtype, Tag};
use lockstep_plan::Recompute;
use lockstep_plan::context::Run;

use crate::{Batch, Ctx, Groups, Model, Offloading, Pass, Slot, StagePass, Weights};

/// Keys and values of one sequence, block by block.
pub struct Cache {
    blocks: Vec<Slot>,
    len: usize,
    dtype: Dtype,
    /// Text is generated on one rank.
    groups: Groups,
}

impl Cache {
    pub fn new(model: &Model, dtype: Dtype) -> Cache {
        let blocks = model.part.blocks.iter().map(|_| Slot::default()).collect();
        Cache { blocks, len: 0, dtype, groups: Groups::alone() }
    }

    /// Tokens in the cache.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Removes all tokens.
    pub fn clear(&mut self) {
        self.len = 0;
    }
}

impl Model {
    /// Adds `ids` to the cache and returns the logits of the next token.
    ///
    /// # Panics
    /// If `ids` is empty, if the sequence becomes longer than the model's, or if the rank does not hold the whole model.
    pub fn extend(
        &self,
        device: &Device,
        weights: &Weights,
        cache: &mut Cache,
        ids: &[u32],
    ) -> Vec<f32> {
        let (start, end) = (cache.len, cache.len + ids.len());
        assert!(!ids.is_empty(), "at least one token is needed to predict the next");
        assert!(end <= self.seq, "{end} tokens are more than the model's {}", self.seq);
        self.assert_whole();
        let Cache { blocks, len, dtype, groups } = cache;
        let (dtype, recompute) = (*dtype, Recompute::Full);
        let pass = &Pass {
            device,
            groups,
            dtype,
            recompute,
            dropout: None,
            global_tokens: 1,
            loads: None,
            offload: Offloading::default(),
            fp8: None,
        };
        let batch = &Batch::prompt(device, start, ids);
        let at = StagePass { stage: 0, pass, batch, defer_weight_grads: false };

        let mut x = batch.inputs.clone();
        for (number, (block, cache)) in self.blocks.iter().zip(blocks).enumerate() {
            let cx = self.ctx(&at, None, weights, number);
            if !self.part.is_last(number) {
                x = block.extend(&cx, x, cache);
                continue;
            }
            // Only the last token's logits are needed.
            let rows = x.rows();
            let mut last = device.empty(1, x.cols(), dtype, Tag::Buffers);
            device.copy(x.view().rows_of(rows - 1..rows), last.view_mut());
            let runs = [Run { start: end - 1, len: 1 }];
            x = block.extend(&Ctx { runs: &runs, ..cx }, last, cache);
        }
        *len = end;
        let mut row = vec![0.0; x.len()];
        device.read(x.view(), &mut row);
        row
    }
}
