//! Unit of work: one KV head of one sequence with all query heads that share it (grouped-query attention). The queries
//! of the group are rows of one matrix, ordered by position and then by head.

use crate::AttentionShape;
use std::ops::Range;

#[derive(Clone, Copy)]
pub(super) struct HeadGroup<'a> {
    pub shape: &'a AttentionShape,
    pub batch: usize,
    pub kv_head: usize,
}

/// Location of a query.
#[derive(Clone, Copy)]
pub(super) struct QueryLocation {
    /// Row of q and out.
    pub token: usize,
    /// First column of its head in out, and in q relative to q's offset.
    pub column: usize,
    /// Element of lse.
    pub lse: usize,
}

impl<'a> HeadGroup<'a> {
    pub fn nth(shape: &'a AttentionShape, index: usize) -> HeadGroup<'a> {
        HeadGroup { shape, batch: index / shape.kv_heads, kv_head: index % shape.kv_heads }
    }

    pub fn rows(&self) -> usize {
        self.shape.q_len * self.shape.group()
    }

    pub fn place(&self, row: usize) -> QueryLocation {
        let AttentionShape { heads, head_dim, q_len, .. } = *self.shape;
        let (position, head_in_group) = (row / self.shape.group(), row % self.shape.group());
        let head = self.kv_head * self.shape.group() + head_in_group;
        QueryLocation {
            token: self.batch * q_len + position,
            column: head * head_dim,
            lse: (self.batch * heads + head) * q_len + position,
        }
    }

    /// Number of keys visible to a row. They are the first ones.
    pub fn visible_keys(&self, row: usize) -> usize {
        let AttentionShape { k_len, q_start, k_start, .. } = *self.shape;
        (q_start + row / self.shape.group() + 1).saturating_sub(k_start).min(k_len)
    }

    /// First row to which a key is visible.
    pub fn first_visible_row(&self, key: usize) -> usize {
        let AttentionShape { q_start, k_start, .. } = *self.shape;
        ((k_start + key).saturating_sub(q_start) * self.shape.group()).min(self.rows())
    }

    /// Number of blocks of `queries` rows.
    pub fn blocks(&self, queries: usize) -> usize {
        self.rows().div_ceil(queries)
    }

    pub fn block(&self, queries: usize, index: usize) -> Range<usize> {
        index * queries..((index + 1) * queries).min(self.rows())
    }

    /// Parts of a tile to compute: the whole tile, or, on the diagonal, a few queries at a time with only the keys that
    /// are visible to them, rounded up to `pad`.
    pub fn sub_tiles(
        &self,
        rows: &Range<usize>,
        tile: Range<usize>,
        pad: usize,
    ) -> impl Iterator<Item = SubTile> {
        let (group, rows, least) = (*self, rows.clone(), self.visible_keys(rows.start));
        let step = if least < tile.end { DIAGONAL_QUERIES } else { rows.len() };
        (0..rows.len()).step_by(step).filter_map(move |lane| {
            let lanes = lane..(lane + step).min(rows.len());
            let visible = group.visible_keys(rows.start + lanes.end - 1).min(tile.end);
            let keys = visible.saturating_sub(tile.start).next_multiple_of(pad);
            let masked = group.visible_keys(rows.start + lane) < tile.start + keys;
            (keys > 0).then_some(SubTile { lanes, first_key: tile.start, keys, masked })
        })
    }
}

/// Queries of a sub-tile on the diagonal.
const DIAGONAL_QUERIES: usize = 32;

/// Some queries of a block with some keys of a tile.
#[derive(Clone)]
pub(super) struct SubTile {
    /// Queries of the block, without padding.
    pub lanes: Range<usize>,
    pub first_key: usize,
    pub keys: usize,
    /// Whether any of the keys is hidden from any of the queries.
    pub masked: bool,
}
