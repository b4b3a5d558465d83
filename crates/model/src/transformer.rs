//! The blocks of the built-in families.

use std::ops::Range;
use std::sync::Arc;

use lockstep_kernels::{RopeScaling, RopeTable, VocabShard};
use lockstep_plan::model::{BlockParams, Family, Part, Shape};

use crate::Block;
use crate::embed::Embed;
use crate::head::{Head, HeadVocab};
use crate::layer::Layer;

/// Builds the blocks of a GPT-2, Llama or mixture-of-experts model on one rank.
pub struct Transformer {
    /// Shape on this rank.
    local: Shape,
    /// Vocabulary size of the whole model, and this rank's range of it.
    vocab: usize,
    vocab_range: Range<usize>,
    /// Longest range on any rank.
    longest_range: usize,
    rope: Option<Arc<RopeTable>>,
}

impl Transformer {
    pub fn new(shape: &Shape, part: &Part) -> Transformer {
        let scaling = shape.rope_scaling.map(|scaling| RopeScaling {
            factor: scaling.factor,
            low_freq_factor: scaling.low_freq_factor,
            high_freq_factor: scaling.high_freq_factor,
            original_positions: scaling.original_seq,
        });
        let rope = (shape.family != Family::Gpt2).then(|| {
            Arc::new(RopeTable::new(shape.head_dim, shape.seq, shape.rope_theta, scaling))
        });
        Transformer {
            local: shape.on_rank(&part.mesh, part.coord),
            vocab: shape.vocab,
            vocab_range: shape.vocab_on_rank(&part.mesh, part.coord),
            longest_range: shape.vocab.div_ceil(part.mesh.tensor),
            rope,
        }
    }

    /// The block with these parameters: `embed`, `head`, or a layer.
    pub fn block(&self, params: &BlockParams) -> Box<dyn Block> {
        let params = params.clone();
        match params.name.as_str() {
            "embed" => {
                let shard = VocabShard { first: self.vocab_range.start, vocab: self.vocab };
                Box::new(Embed::new(params, shard))
            }
            "head" => {
                let (range, longest) = (self.vocab_range.clone(), self.longest_range);
                Box::new(Head::new(params, HeadVocab { range, longest }, self.local.norm_eps))
            }
            _ => Box::new(Layer::new(&self.local, params, self.rope.clone())),
        }
    }
}
