//! Gradients of the parameters on a rank: where a backward pass puts them, and what is left of them once they
//! are summed over the ranks.
//!
//! A buffer exists from its block's backward pass until it is summed or cleared, so that in one pass
//! gradients take the place of the activations that made them. Neighbouring blocks share a buffer, a
//! *bucket*, as long as it is smaller than what is worth sending alone.

use lockstep_kernels::{Device, Dtype, Tag, Tensor, View, ViewMut};
use lockstep_plan::model::{Part, Shard};

/// Gradients, block by block.
pub struct Gradients {
    pub(crate) buckets: Vec<Bucket>,
    places: Vec<Place>,
    pub(crate) shards: Vec<Vec<Shard>>,
    /// Summed over the ranks: this rank's run of each unit, where it is less than the whole.
    pub(crate) shares: Vec<Vec<Option<Tensor>>>,
    /// ZeRO's.
    pub(crate) stage: u8,
    /// In which they are kept and summed.
    pub(crate) dtype: Dtype,
}

/// Blocks that lie in one buffer, the last of them first.
pub(crate) struct Bucket {
    pub buffer: Option<Tensor>,
    pub len: usize,
    /// In the order of the backward pass.
    pub blocks: Vec<usize>,
    /// How many of them have their gradient.
    pub complete: usize,
}

#[derive(Clone)]
struct Place {
    bucket: usize,
    start: usize,
    len: usize,
    /// Whether something was written there since it was cleared.
    filled: bool,
}

impl Gradients {
    /// For what a rank holds; ZeRO's shares are exchanged block by block, others in buckets of at least
    /// `bucket_bytes`.
    pub fn new(part: &Part, stage: u8, bucket_bytes: usize, dtype: Dtype) -> Gradients {
        let least = if stage == 0 { bucket_bytes / dtype.bytes() } else { 0 };
        let mut buckets: Vec<Bucket> = Vec::new();
        let mut places =
            vec![Place { bucket: 0, start: 0, len: 0, filled: false }; part.blocks.len()];
        for (block, layout) in part.blocks.iter().enumerate().rev() {
            if buckets.last().is_none_or(|bucket| bucket.len >= least) {
                buckets.push(Bucket { buffer: None, len: 0, blocks: vec![], complete: 0 });
            }
            let number = buckets.len() - 1;
            let bucket = &mut buckets[number];
            let len = layout.len();
            places[block] = Place { bucket: number, start: bucket.len, len, filled: false };
            bucket.len += len;
            bucket.blocks.push(block);
        }
        let shares =
            part.shards.iter().map(|shards| shards.iter().map(|_| None).collect()).collect();
        Gradients { buckets, places, shards: part.shards.clone(), shares, stage, dtype }
    }

    /// Where a backward pass writes the gradient of a block, and whether it already holds something to add
    /// to.
    pub fn block(&mut self, device: &Device, block: usize) -> (ViewMut<'_>, bool) {
        self.exists(device, block);
        let Place { bucket, start, len, filled } = &mut self.places[block];
        let before = std::mem::replace(filled, true);
        let buffer = self.buckets[*bucket].buffer.as_mut().expect("just made");
        (buffer.view_mut().part(*start..*start + *len), before)
    }

    /// The same of two blocks together.
    pub fn two(
        &mut self,
        device: &Device,
        one: usize,
        other: usize,
    ) -> ((ViewMut<'_>, bool), (ViewMut<'_>, bool)) {
        self.exists(device, one);
        self.exists(device, other);
        let before =
            [one, other].map(|block| std::mem::replace(&mut self.places[block].filled, true));
        let (a, b) = (self.places[one].clone(), self.places[other].clone());
        let (one, other) = if a.bucket == b.bucket {
            let buffer = self.buckets[a.bucket].buffer.as_mut().expect("just made").view_mut();
            let at = a.start.max(b.start);
            let (low, high) = buffer.split_at(at);
            if a.start < b.start {
                (low.part(a.start..a.start + a.len), high.part(0..b.len))
            } else {
                (high.part(0..a.len), low.part(b.start..b.start + b.len))
            }
        } else {
            let both = self.buckets.get_disjoint_mut([a.bucket, b.bucket]);
            let [first, second] = both.expect("two different buckets that are there");
            let [first, second] =
                [first, second].map(|bucket| bucket.buffer.as_mut().expect("just made").view_mut());
            (first.part(a.start..a.start + a.len), second.part(b.start..b.start + b.len))
        };
        ((one, before[0]), (other, before[1]))
    }

    fn exists(&mut self, device: &Device, block: usize) {
        let bucket = &mut self.buckets[self.places[block].bucket];
        let (len, dtype) = (bucket.len, self.dtype);
        bucket.buffer.get_or_insert_with(|| device.empty(1, len, dtype, Tag::Gradients));
    }

    /// Whether a backward pass has been at a block since its gradient was cleared.
    pub fn filled(&self, block: usize) -> bool {
        self.places[block].filled
    }

    /// The gradient of a block before it is summed over the ranks.
    pub fn get(&self, block: usize) -> Option<View<'_>> {
        let Place { bucket, start, len, filled } = &self.places[block];
        let buffer = self.buckets[*bucket].buffer.as_ref().filter(|_| *filled)?;
        Some(buffer.view().part(*start..*start + *len))
    }

    /// The summed gradient of this rank's run of a unit.
    pub fn own(&self, block: usize, unit: usize) -> Option<View<'_>> {
        match &self.shares[block][unit] {
            Some(share) => Some(share.view()),
            None => Some(self.get(block)?.part(self.shards[block][unit].own.clone())),
        }
    }

    /// The same, to be changed in place.
    pub fn own_mut(&mut self, block: usize, unit: usize) -> Option<ViewMut<'_>> {
        let own = self.shards[block][unit].own.clone();
        if let Some(share) = &mut self.shares[block][unit] {
            return Some(share.view_mut());
        }
        let Place { bucket, start, filled, .. } = self.places[block].clone();
        let buffer = self.buckets[bucket].buffer.as_mut().filter(|_| filled)?;
        Some(buffer.view_mut().part(start + own.start..start + own.end))
    }

    /// Gives the buffer of a bucket up: the next backward pass starts it anew.
    pub(crate) fn take(&mut self, bucket: usize) -> Option<Tensor> {
        let Bucket { buffer, blocks, complete, .. } = &mut self.buckets[bucket];
        for block in blocks {
            self.places[*block].filled = false;
        }
        *complete = 0;
        buffer.take()
    }

    /// Puts a bucket's buffer back, with something in it.
    pub(crate) fn put(&mut self, bucket: usize, buffer: Tensor) {
        self.buckets[bucket].buffer = Some(buffer);
        for &block in &self.buckets[bucket].blocks {
            self.places[block].filled = true;
        }
    }

    pub(crate) fn bucket_of(&self, block: usize) -> usize {
        self.places[block].bucket
    }

    pub(crate) fn len_of(&self, block: usize) -> usize {
        self.places[block].len
    }

    /// Where a block lies in its bucket.
    pub(crate) fn start_of(&self, block: usize) -> usize {
        self.places[block].start
    }

    /// Gives all memory back: the next pass starts anew.
    pub fn clear(&mut self) {
        (0..self.buckets.len()).for_each(|bucket| drop(self.take(bucket)));
        self.shares.iter_mut().flatten().for_each(|share| *share = None);
    }

    /// Blocks on this rank.
    pub fn blocks(&self) -> usize {
        self.places.len()
    }

    /// How many units a block has.
    pub fn units(&self, block: usize) -> usize {
        self.shards[block].len()
    }
}
