//! Buckets: which blocks share a gradient buffer, and which collectives reduce it.

use std::ops::Range;

use super::ReductionPolicy;
use crate::mesh::GroupKind;
use crate::model::{Part, Unit};

/// Blocks whose gradients are stored in one buffer and reduced together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bucket {
    /// In the order of the backward pass, which is their order in the buffer.
    pub blocks: Vec<usize>,
    /// Elements.
    pub len: usize,
    pub runs: Vec<BucketRun>,
}

/// A range of a bucket that one collective reduces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BucketRun {
    pub range: Range<usize>,
    pub group: GroupKind,
    /// With sharded gradients: this rank's part of `range`, and the group that all-reduces it after the last
    /// micro-batch.
    pub shard: Option<(Range<usize>, GroupKind)>,
}

/// A rank's buckets. Sharded gradients have one block per bucket and one run per unit. Whole gradients share a bucket
/// until it has `min_len` elements, and neighbouring units of the same group form one run.
pub(super) fn buckets(policy: &ReductionPolicy, part: &Part, min_len: usize) -> Vec<Bucket> {
    let shards = policy.shards_gradients();
    let min_len = if shards { 0 } else { min_len };
    let mut buckets: Vec<Bucket> = Vec::new();
    for (block, layout) in part.blocks.iter().enumerate().rev() {
        if buckets.last().is_none_or(|bucket| bucket.len >= min_len) {
            buckets.push(Bucket { blocks: vec![], len: 0, runs: vec![] });
        }
        let bucket = buckets.last_mut().expect("there is one now");
        for shard in &part.shards[block] {
            let range = offset(&shard.unit.range, bucket.len);
            if shards {
                let own = offset(&shard.own, bucket.len);
                let (group, copies) = shard_groups(shard.unit.expert);
                bucket.runs.push(BucketRun { range, group, shard: Some((own, copies)) });
                continue;
            }
            let (_, group) = shard_groups(shard.unit.expert);
            match bucket.runs.last_mut() {
                Some(run) if run.group == group && run.range.end == range.start => {
                    run.range.end = range.end
                }
                _ => bucket.runs.push(BucketRun { range, group, shard: None }),
            }
        }
        bucket.len += layout.len();
        bucket.blocks.push(block);
    }
    buckets
}

impl Bucket {
    /// The blocks that a run covers, and their ranges relative to the start of each block.
    pub fn blocks_of(&self, run: &BucketRun, part: &Part) -> Vec<(usize, Range<usize>)> {
        let mut start = 0;
        let mut covered = Vec::new();
        for &block in &self.blocks {
            let end = start + part.blocks[block].len();
            let (from, to) = (run.range.start.max(start), run.range.end.min(end));
            if from < to {
                covered.push((block, from - start..to - start));
            }
            start = end;
        }
        covered
    }
}

fn offset(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}

/// The group among which a unit is sharded, and the group of the shard's copies. Unsharded units have one shard, so
/// that all replicas are copies.
fn shard_groups(expert: bool) -> (GroupKind, GroupKind) {
    match expert {
        true => (GroupKind::ExpertShard, GroupKind::ExpertCopies),
        false => (GroupKind::Shard, GroupKind::Copies),
    }
}

/// The group that all-gathers a unit's parameters: the ranks of its shard group, in a group of its own so that gathers
/// do not wait for reductions.
pub fn gather_group(unit: &Unit) -> GroupKind {
    if unit.expert { GroupKind::ExpertGather } else { GroupKind::Gather }
}
