//! The first block: from token ids to the residual stream.

use std::ops::Range;

use lockstep_kernels::{Tensor, View, ViewMut, Vocabulary};
use lockstep_plan::model::{BlockParams, Part, Shape};

use crate::Ctx;
use crate::weight_grads::wide;

pub(crate) struct Embed {
    /// (vocab, dim)
    pub tokens: Range<usize>,
    /// (seq, dim), learned
    pub positions: Option<Range<usize>>,
    rows: usize,
    held: Vocabulary,
    dim: usize,
}

/// The embedding's place among those that drop.
const SITE: u64 = 0;

impl Embed {
    pub fn new(shape: &Shape, part: &Part, params: &BlockParams) -> Embed {
        let has_positions = params.params.iter().any(|param| param.name == "positions");
        let vocab = shape.vocab_on_rank(&part.mesh, part.coord);
        Embed {
            tokens: params.range("tokens"),
            positions: has_positions.then(|| params.range("positions")),
            rows: vocab.len(),
            held: Vocabulary { first: vocab.start, vocab: shape.vocab },
            dim: shape.dim,
        }
    }

    /// Each rank of the tensor axis has some rows of the table, and gives nought for the others.
    pub fn forward(&self, cx: &Ctx<'_>, weights: View<'_>, ids: View<'_>) -> Tensor {
        let (device, groups) = (cx.device, cx.groups);
        let mut x = match groups.sequence {
            true => cx.scratch(cx.tokens(), self.dim),
            false => cx.kept(cx.tokens(), self.dim),
        };
        let positions = self.positions.clone().filter(|_| groups.adds());
        let positions = positions.map(|range| weights.part(range));
        for (run, rows) in cx.placed_runs() {
            let (ids, out) = (ids.part(rows.clone()), x.view_mut().rows_of(rows));
            device.embed(ids, self.table(weights), self.held, positions, run.start, run.len, out);
        }
        let mut x = groups.leave(device, x);
        cx.drop_out(SITE, &mut x);
        x
    }

    /// `accumulate` tells whether the block's gradient holds something of an earlier micro-batch, and
    /// `tokens_filled` whether the token table's part does: the output projection may have been there before.
    pub fn backward(
        &self,
        cx: &Ctx<'_>,
        ids: View<'_>,
        dy: Tensor,
        mut grads: ViewMut<'_>,
        accumulate: bool,
        tokens_filled: bool,
    ) {
        let device = cx.device;
        let mut dy = cx.own(dy);
        cx.drop_out(SITE, &mut dy);
        let dy = cx.groups.leave_backward(device, dy);
        if let Some(positions) = &self.positions {
            let place = grads.reborrow().part(positions.clone());
            wide(device, place, accumulate, |mut place, accumulate| {
                for (index, (run, rows)) in cx.placed_runs().enumerate() {
                    let (dy, add) = (dy.view().rows_of(rows), accumulate || index > 0);
                    let place = place.reborrow();
                    device.embed_positions_backward(dy, run.start, run.len, place, add);
                }
            });
        }
        let tokens = grads.part(self.tokens.clone()).shaped(self.rows, self.dim);
        wide(device, tokens, tokens_filled, |tokens, filled| {
            device.embed_backward(ids, dy.view(), self.held, tokens, filled);
        });
    }

    pub fn table<'a>(&self, weights: View<'a>) -> View<'a> {
        weights.part(self.tokens.clone()).shaped(self.rows, self.dim)
    }
}
