//! Token and position embeddings.

use super::{Backend, Device, OpClass, with_float};
use crate::cpu::embedding::{self, TableGradient, Tokens};
use crate::cuda;
use crate::{View, ViewMut};

/// The range of token ids whose rows a table holds: the whole vocabulary, or one rank's shard.
#[derive(Clone, Copy, Debug)]
pub struct VocabShard {
    /// Token id of the table's first row.
    pub first: usize,
    /// Size of the whole vocabulary. A larger id is an error.
    pub vocab: usize,
}

impl VocabShard {
    /// The whole vocabulary.
    pub fn all(vocab: usize) -> VocabShard {
        VocabShard { first: 0, vocab }
    }
}

/// Positions of rows: row r is at position `start + r % len`.
#[derive(Clone, Copy, Debug)]
pub struct PositionRange {
    pub start: usize,
    pub len: usize,
}

impl Device {
    /// `out[r] = table[ids[r]] + positions[position of r]`, (tokens, dim). Rows of ids in another shard are zero
    /// before the position is added.
    pub fn embed(
        &self,
        ids: View<'_>,
        table: View<'_>,
        shard: VocabShard,
        positions: Option<(View<'_>, PositionRange)>,
        out: ViewMut<'_>,
    ) {
        self.execute(OpClass::Embedding, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(table.dtype(), E => {
                let positions = positions.map(|(table, range)| (table.host::<E>(), range));
                let tokens = Tokens { ids: ids.host(), shard };
                embedding::forward(cpu, tokens, table.host(), positions, out.host())
            }),
            Backend::Cuda(gpu) => {
                let tokens = cuda::embedding::Tokens { ids, shard };
                cuda::embedding::forward(gpu, tokens, table, positions, out)
            }
        })
    }

    /// Adds each row of `dy` to the row of its id in the table's gradient, which is cleared first unless `accumulate`.
    pub fn embed_backward(
        &self,
        ids: View<'_>,
        dy: View<'_>,
        shard: VocabShard,
        dtable: ViewMut<'_>,
        accumulate: bool,
    ) {
        self.execute(OpClass::Embedding, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(dy.dtype(), E => {
                let tokens = Tokens { ids: ids.host(), shard };
                let gradient = TableGradient { table: dtable.host(), accumulate };
                embedding::backward(cpu, tokens, dy.host::<E>(), gradient)
            }),
            Backend::Cuda(gpu) => {
                let tokens = cuda::embedding::Tokens { ids, shard };
                cuda::embedding::backward(gpu, tokens, dy, dtable, accumulate)
            }
        })
    }

    /// Gradient of the position table.
    pub fn embed_positions_backward(
        &self,
        dy: View<'_>,
        range: PositionRange,
        dpositions: ViewMut<'_>,
        accumulate: bool,
    ) {
        let dim = dy.cols();
        self.execute(OpClass::Embedding, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(dy.dtype(), E => {
                let gradient = TableGradient { table: dpositions.host(), accumulate };
                embedding::positions_backward(cpu, dy.host::<E>(), dim, range, gradient)
            }),
            Backend::Cuda(gpu) => {
                cuda::embedding::positions_backward(gpu, dy, range, dpositions, accumulate)
            }
        })
    }
}
