//! Work partition among threads. Results do not depend on the number of threads.

use super::head_group::HeadGroup;
use crate::AttentionShape;
use std::ops::Range;

/// One of `count` threads.
#[derive(Clone, Copy)]
pub(super) struct Worker {
    pub index: usize,
    pub count: usize,
}

/// Queries per block, and keys per tile.
#[derive(Clone, Copy)]
pub(super) struct BlockSizes {
    pub queries: usize,
    pub keys: usize,
}

/// Part of the backward pass of one head group.
pub(super) struct BackwardTask {
    /// Blocks of queries to visit.
    pub blocks: Range<usize>,
    /// Tiles of keys to visit.
    pub tiles: Range<usize>,
    /// Write dq, which needs all tiles.
    pub dq: bool,
    /// Write dk and dv of these tiles, which needs all blocks.
    pub dkv: bool,
}

/// Calls `work` with each block of queries of this worker, and whether it is the first of its head group. Blocks are
/// independent, so any partition gives the same results.
pub(super) fn forward(
    shape: &AttentionShape,
    sizes: BlockSizes,
    worker: Worker,
    mut work: impl FnMut(&HeadGroup<'_>, Range<usize>, bool),
) {
    let groups = shape.batch * shape.kv_heads;
    let cost = |group: &HeadGroup<'_>, block: usize| {
        group.visible_keys(group.block(sizes.queries, block).end - 1) + 16
    };
    let whole = HeadGroup::nth(shape, 0);
    let total =
        (0..whole.blocks(sizes.queries)).map(|block| cost(&whole, block)).sum::<usize>() * groups;
    let mut partition = Partition::new(total, worker);
    for group in (0..groups).map(|index| HeadGroup::nth(shape, index)) {
        let mut first = true;
        for block in 0..group.blocks(sizes.queries) {
            if partition.take(cost(&group, block)) {
                work(&group, group.block(sizes.queries, block), first);
                first = false;
            }
        }
    }
}

/// Calls `work` with each task of this worker. Workers get equal numbers of whole head groups. The remaining groups are
/// divided by tiles of keys for dk and dv, and then by blocks of queries for dq. This computes their tiles twice, with
/// seven products instead of five, and gives the same bits.
pub(super) fn backward(
    shape: &AttentionShape,
    sizes: BlockSizes,
    worker: Worker,
    mut work: impl FnMut(&HeadGroup<'_>, BackwardTask),
) {
    let groups = shape.batch * shape.kv_heads;
    let each = groups / worker.count;
    let whole = HeadGroup::nth(shape, 0);
    let (blocks, tiles) = (0..whole.blocks(sizes.queries), 0..shape.k_len.div_ceil(sizes.keys));
    for group in
        (worker.index * each..(worker.index + 1) * each).map(|index| HeadGroup::nth(shape, index))
    {
        work(
            &group,
            BackwardTask { blocks: blocks.clone(), tiles: tiles.clone(), dq: true, dkv: true },
        );
    }
    let rest = each * worker.count..groups;
    let cost = |tile: &usize| whole.rows() - whole.first_visible_row(tile * sizes.keys) + 16;
    let mut partition =
        Partition::new(tiles.clone().map(|tile| cost(&tile)).sum::<usize>() * rest.len(), worker);
    for group in rest.clone().map(|index| HeadGroup::nth(shape, index)) {
        let mine = range_of(tiles.clone().filter(|tile| partition.take(cost(tile))));
        if !mine.is_empty() {
            work(
                &group,
                BackwardTask { blocks: blocks.clone(), tiles: mine, dq: false, dkv: true },
            );
        }
    }
    let cost = |block: &usize| whole.visible_keys(whole.block(sizes.queries, *block).end - 1) + 16;
    let mut partition = Partition::new(
        blocks.clone().map(|block| cost(&block)).sum::<usize>() * rest.len(),
        worker,
    );
    for group in rest.map(|index| HeadGroup::nth(shape, index)) {
        let mine = range_of(blocks.clone().filter(|block| partition.take(cost(block))));
        if !mine.is_empty() {
            work(&group, BackwardTask { blocks: mine, tiles: tiles.clone(), dq: true, dkv: false });
        }
    }
}

/// The range of consecutive numbers.
fn range_of(numbers: impl Iterator<Item = usize>) -> Range<usize> {
    numbers.fold(
        0..0,
        |run, number| if run.is_empty() { number..number + 1 } else { run.start..number + 1 },
    )
}

/// Divides a sequence of items among workers by cost. Each item belongs to exactly one worker, and all workers get
/// about the same total cost.
struct Partition {
    total: usize,
    worker: Worker,
    assigned: usize,
}

impl Partition {
    fn new(total: usize, worker: Worker) -> Partition {
        Partition { total, worker, assigned: 0 }
    }

    /// Whether the next item, of the given cost, belongs to this worker.
    fn take(&mut self, cost: usize) -> bool {
        let middle = 2 * self.assigned + cost;
        self.assigned += cost;
        let owner =
            (middle * self.worker.count / (2 * self.total).max(1)).min(self.worker.count - 1);
        owner == self.worker.index
    }
}
