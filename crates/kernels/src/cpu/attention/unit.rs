//! A unit of work: one key head of one sequence, with the queries of all heads that share it. The queries
//! of a group are taken as rows of one matrix, position by position and head by head, so that grouped keys
//! are no special case: a row is a query, whatever its head.

use super::AttentionShape;
use std::ops::Range;

#[derive(Clone, Copy)]
pub(super) struct Unit<'a> {
    pub shape: &'a AttentionShape,
    pub batch: usize,
    pub kv_head: usize,
}

/// Where a row of queries lies.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// The row in q and out.
    pub token: usize,
    /// Its head's first column in out, and in q counted from q's offset.
    pub column: usize,
    /// Its element of lse.
    pub lse: usize,
}

impl<'a> Unit<'a> {
    pub fn nth(shape: &'a AttentionShape, number: usize) -> Unit<'a> {
        Unit { shape, batch: number / shape.kv_heads, kv_head: number % shape.kv_heads }
    }

    pub fn rows(&self) -> usize {
        self.shape.q_len * self.shape.group()
    }

    pub fn place(&self, row: usize) -> Place {
        let AttentionShape { heads, head_dim, q_len, .. } = *self.shape;
        let (at, member) = (row / self.shape.group(), row % self.shape.group());
        let head = self.kv_head * self.shape.group() + member;
        Place {
            token: self.batch * q_len + at,
            column: head * head_dim,
            lse: (self.batch * heads + head) * q_len + at,
        }
    }

    /// How many keys a row sees; it sees the first ones.
    pub fn seen(&self, row: usize) -> usize {
        let AttentionShape { k_len, q_start, k_start, .. } = *self.shape;
        (q_start + row / self.shape.group() + 1).saturating_sub(k_start).min(k_len)
    }

    /// The first row that sees a key.
    pub fn first_to_see(&self, key: usize) -> usize {
        let AttentionShape { q_start, k_start, .. } = *self.shape;
        ((k_start + key).saturating_sub(q_start) * self.shape.group()).min(self.rows())
    }

    /// How many blocks of so many queries there are.
    pub fn blocks(&self, queries: usize) -> usize {
        self.rows().div_ceil(queries)
    }

    pub fn block(&self, queries: usize, number: usize) -> Range<usize> {
        number * queries..((number + 1) * queries).min(self.rows())
    }

    /// What of a tile must be computed: all of it at once, or, where the diagonal cuts it, a few queries at a
    /// time, each with no more keys than they see (rounded up to `pad`).
    pub fn strips(
        &self,
        rows: &Range<usize>,
        tile: Range<usize>,
        pad: usize,
    ) -> impl Iterator<Item = Strip> {
        let (unit, rows, least) = (*self, rows.clone(), self.seen(rows.start));
        let few = if least < tile.end { STRIP } else { rows.len() };
        (0..rows.len()).step_by(few).filter_map(move |lane| {
            let lanes = lane..(lane + few).min(rows.len());
            let seen = unit.seen(rows.start + lanes.end - 1).min(tile.end);
            let keys = seen.saturating_sub(tile.start).next_multiple_of(pad);
            let cuts = unit.seen(rows.start + lane) < tile.start + keys;
            (keys > 0).then_some(Strip { lanes, first_key: tile.start, keys, cuts })
        })
    }
}

/// Queries of a strip on the diagonal.
const STRIP: usize = 32;

/// Some queries of a block with some keys of a tile.
#[derive(Clone)]
pub(super) struct Strip {
    /// Which queries of the block, without what pads them.
    pub lanes: Range<usize>,
    pub first_key: usize,
    pub keys: usize,
    /// Whether any of the queries misses any of the keys.
    pub cuts: bool,
}
