//! The first block: from token ids to the residual stream.

use std::ops::Range;

use lockstep_kernels::{Tensor, View, ViewMut};
use lockstep_plan::model::{BlockParams, Shape};

use crate::Cx;

pub(crate) struct Embed {
    pub params: BlockParams,
    /// (vocab, dim)
    pub tokens: Range<usize>,
    /// (seq, dim), learned
    pub positions: Option<Range<usize>>,
    vocab: usize,
    dim: usize,
}

/// The embedding's place among those that drop.
const SITE: u64 = 0;

impl Embed {
    pub fn new(shape: &Shape) -> Embed {
        let params = shape.embed();
        let has_positions = params.params.iter().any(|param| param.name == "positions");
        Embed {
            tokens: params.range("tokens"),
            positions: has_positions.then(|| params.range("positions")),
            vocab: shape.vocab,
            dim: shape.dim,
            params,
        }
    }

    /// `start` is the position of each sequence's first token: not zero when a cache holds those before.
    pub fn forward(&self, cx: &Cx<'_>, weights: View<'_>, ids: View<'_>, start: usize) -> Tensor {
        let mut x = cx.kept(self.dim);
        let positions = self.positions.clone().map(|range| weights.part(range));
        cx.device.embed(ids, self.table(weights), positions, start, cx.seq, x.view_mut());
        cx.drop_out(SITE, &mut x);
        x
    }

    /// `accumulate` tells whether the block's gradient holds something of an earlier micro-batch, and
    /// `tokens_filled` whether the token table's part does: the output projection may have been there before.
    pub fn backward(
        &self,
        cx: &Cx<'_>,
        ids: View<'_>,
        dy: Tensor,
        mut grads: ViewMut<'_>,
        accumulate: bool,
        tokens_filled: bool,
    ) {
        let mut dy = cx.own(dy);
        cx.drop_out(SITE, &mut dy);
        if let Some(positions) = &self.positions {
            let part = grads.reborrow().part(positions.clone());
            cx.device.embed_positions_backward(dy.view(), cx.seq, part, accumulate);
        }
        let tokens = grads.part(self.tokens.clone());
        cx.device.embed_backward(
            ids,
            dy.view(),
            tokens.shaped(self.vocab, self.dim),
            tokens_filled,
        );
    }

    pub fn table<'a>(&self, weights: View<'a>) -> View<'a> {
        weights.part(self.tokens.clone()).shaped(self.vocab, self.dim)
    }
}
