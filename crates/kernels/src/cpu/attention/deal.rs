//! Who does what: the work of a pass is dealt out to a team so that results do not depend on its size.

use super::AttentionShape;
use super::unit::Unit;
use std::ops::Range;

/// A member of a team.
#[derive(Clone, Copy)]
pub(super) struct Member {
    pub number: usize,
    pub size: usize,
}

/// How many queries a block has, and keys a tile.
#[derive(Clone, Copy)]
pub(super) struct Grain {
    pub queries: usize,
    pub keys: usize,
}

/// What a backward pass over a unit's tiles is for.
pub(super) struct Want {
    /// Blocks of queries to visit.
    pub blocks: Range<usize>,
    /// Tiles of keys to visit.
    pub tiles: Range<usize>,
    /// Whether to write dq, for which all tiles must be visited.
    pub dq: bool,
    /// Whether to write dk and dv of these tiles, for which all blocks must be visited.
    pub dkv: bool,
}

/// Calls `work` with a member's share of the blocks of all units, and whether it is the first of its unit.
/// Every block is computed by itself, so any share will do.
pub(super) fn forward(
    shape: &AttentionShape,
    grain: Grain,
    me: Member,
    mut work: impl FnMut(&Unit<'_>, Range<usize>, bool),
) {
    let units = shape.batch * shape.kv_heads;
    let cost =
        |unit: &Unit<'_>, block: usize| unit.seen(unit.block(grain.queries, block).end - 1) + 16;
    let whole = Unit::nth(shape, 0);
    let total =
        (0..whole.blocks(grain.queries)).map(|block| cost(&whole, block)).sum::<usize>() * units;
    let mut deal = Deal::new(total, me);
    for unit in (0..units).map(|number| Unit::nth(shape, number)) {
        let mut first = true;
        for block in 0..unit.blocks(grain.queries) {
            if deal.next(cost(&unit, block)) {
                work(&unit, unit.block(grain.queries, block), first);
                first = false;
            }
        }
    }
}

/// Calls `work` with a member's share of a backward pass. Units are dealt out whole as long as everybody gets
/// as many. What remains is cut: each member takes tiles of keys for dk and dv, and then blocks of queries
/// for dq. That computes the tiles twice, seven products instead of five, and gives the same bits.
pub(super) fn backward(
    shape: &AttentionShape,
    grain: Grain,
    me: Member,
    mut work: impl FnMut(&Unit<'_>, Want),
) {
    let units = shape.batch * shape.kv_heads;
    let each = units / me.size;
    let whole = Unit::nth(shape, 0);
    let (blocks, tiles) = (0..whole.blocks(grain.queries), 0..shape.k_len.div_ceil(grain.keys));
    for unit in (me.number * each..(me.number + 1) * each).map(|number| Unit::nth(shape, number)) {
        work(&unit, Want { blocks: blocks.clone(), tiles: tiles.clone(), dq: true, dkv: true });
    }
    let rest = each * me.size..units;
    let cost = |tile: &usize| whole.rows() - whole.first_to_see(tile * grain.keys) + 16;
    let mut deal = Deal::new(tiles.clone().map(|tile| cost(&tile)).sum::<usize>() * rest.len(), me);
    for unit in rest.clone().map(|number| Unit::nth(shape, number)) {
        let mine = run_of(tiles.clone().filter(|tile| deal.next(cost(tile))));
        if !mine.is_empty() {
            work(&unit, Want { blocks: blocks.clone(), tiles: mine, dq: false, dkv: true });
        }
    }
    let cost = |block: &usize| whole.seen(whole.block(grain.queries, *block).end - 1) + 16;
    let mut deal =
        Deal::new(blocks.clone().map(|block| cost(&block)).sum::<usize>() * rest.len(), me);
    for unit in rest.map(|number| Unit::nth(shape, number)) {
        let mine = run_of(blocks.clone().filter(|block| deal.next(cost(block))));
        if !mine.is_empty() {
            work(&unit, Want { blocks: mine, tiles: tiles.clone(), dq: true, dkv: false });
        }
    }
}

/// From the first to the last of numbers that follow each other.
fn run_of(numbers: impl Iterator<Item = usize>) -> Range<usize> {
    numbers.fold(
        0..0,
        |run, number| if run.is_empty() { number..number + 1 } else { run.start..number + 1 },
    )
}

/// Which pieces of work are a member's: pieces in a row are dealt out so that everybody gets about the same
/// cost, and each piece to exactly one member.
struct Deal {
    total: usize,
    me: Member,
    dealt: usize,
}

impl Deal {
    fn new(total: usize, me: Member) -> Deal {
        Deal { total, me, dealt: 0 }
    }

    /// Whether the next piece, of this cost, is ours.
    fn next(&mut self, cost: usize) -> bool {
        let middle = 2 * self.dealt + cost;
        self.dealt += cost;
        let owner = (middle * self.me.size / (2 * self.total).max(1)).min(self.me.size - 1);
        owner == self.me.number
    }
}
