//! The first block: from token ids to the residual stream.

use std::ops::Range;

use lockstep_kernels::{PositionRange, Tensor, View, VocabShard};
use lockstep_plan::model::BlockParams;

use crate::{Block, Ctx, Slot, WeightGrads};

pub(crate) struct Embed {
    params: BlockParams,
    /// (vocab, dim)
    tokens: Range<usize>,
    /// (seq, dim), learned
    positions: Option<Range<usize>>,
    rows: usize,
    shard: VocabShard,
    dim: usize,
}

/// Dropout site of the embedding.
const SITE: u64 = 0;

impl Embed {
    pub fn new(params: BlockParams, shard: VocabShard) -> Embed {
        let table = params.get("tokens").expect("an embedding has a token table");
        let (rows, dim) = (table.dims[0], table.dims[1]);
        Embed {
            tokens: params.range("tokens"),
            positions: params.get("positions").map(|_| params.range("positions")),
            rows,
            shard,
            dim,
            params,
        }
    }

    fn table<'a>(&self, cx: &Ctx<'a>) -> View<'a> {
        cx.weights.part(self.tokens.clone()).shaped(self.rows, self.dim)
    }
}

impl Block for Embed {
    fn params(&self) -> &BlockParams {
        &self.params
    }

    /// Each rank of the tensor axis has some rows of the table and contributes zeros for the others.
    fn forward(&self, cx: &Ctx<'_>, ids: Tensor, _saved: &mut Slot) -> Tensor {
        let (device, groups) = (cx.device, cx.groups);
        let mut x = match groups.sequence {
            true => cx.scratch(cx.tokens(), self.dim),
            false => cx.saved(cx.tokens(), self.dim),
        };
        let positions = self.positions.clone().filter(|_| groups.is_tensor_root());
        let positions = positions.map(|range| cx.weights.part(range));
        for (run, rows) in cx.placed_runs() {
            let (ids, out) = (ids.view().part(rows.clone()), x.view_mut().rows_of(rows));
            let range = PositionRange { start: run.start, len: run.len };
            let positions = positions.map(|table| (table, range));
            device.embed(ids, self.table(cx), self.shard, positions, out);
        }
        let mut x = groups.reduce_output(device, x);
        cx.drop_out(SITE, &mut x);
        x
    }

    fn backward(
        &self,
        cx: &Ctx<'_>,
        _saved: &mut Slot,
        dy: Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Option<Tensor> {
        let device = cx.device;
        let mut dy = cx.writable(dy);
        cx.drop_out(SITE, &mut dy);
        let dy = cx.groups.reduce_output_backward(device, dy);
        if let Some(positions) = &self.positions {
            grads.in_f32(positions.clone(), |mut place, accumulate| {
                for (index, (run, rows)) in cx.placed_runs().enumerate() {
                    let (dy, add) = (dy.view().rows_of(rows), accumulate || index > 0);
                    let range = PositionRange { start: run.start, len: run.len };
                    device.embed_positions_backward(dy, range, place.reborrow(), add);
                }
            });
        }
        grads.in_f32(self.tokens.clone(), |place, accumulate| {
            let table = place.shaped(self.rows, self.dim);
            device.embed_backward(cx.inputs, dy.view(), self.shard, table, accumulate);
        });
        None
    }

    fn backward_reads_weights(&self) -> bool {
        false
    }
}
