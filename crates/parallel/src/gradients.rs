//! Gradient buffers of a rank: where backward passes write, and this rank's shards once they are reduced.
//!
//! A buffer exists from the first backward pass of its bucket until it is reduced or cleared, so that within a pass
//! gradients take the place of the activations that produced them.

use std::ops::Range;

use lockstep_kernels::{Device, Dtype, Tag, Tensor, View, ViewMut};
use lockstep_plan::model::{Part, Shard};
use lockstep_plan::reduction;

/// Gradients by block.
pub struct Gradients {
    pub(crate) buckets: Vec<Bucket>,
    places: Vec<Place>,
    pub(crate) shards: Vec<Vec<Shard>>,
    /// By block and unit, this rank's shard of the reduced gradient.
    pub(crate) reduced: Vec<Vec<Option<Tensor>>>,
    pub(crate) dtype: Dtype,
}

/// The buffer of a [`reduction::Bucket`].
pub(crate) struct Bucket {
    pub buffer: Option<Tensor>,
    pub len: usize,
    pub blocks: Vec<usize>,
    /// Blocks whose gradient is complete.
    pub complete: usize,
}

/// A block's range in its bucket.
#[derive(Clone)]
struct Place {
    bucket: usize,
    start: usize,
    len: usize,
    /// Whether it holds a gradient.
    filled: bool,
}

impl Gradients {
    pub fn new(part: &Part, buckets: &[reduction::Bucket], dtype: Dtype) -> Gradients {
        let empty = Place { bucket: 0, start: 0, len: 0, filled: false };
        let mut places = vec![empty; part.blocks.len()];
        for (number, bucket) in buckets.iter().enumerate() {
            let mut start = 0;
            for &block in &bucket.blocks {
                let len = part.blocks[block].len();
                places[block] = Place { bucket: number, start, len, filled: false };
                start += len;
            }
        }
        let bucket = |bucket: &reduction::Bucket| Bucket {
            buffer: None,
            len: bucket.len,
            blocks: bucket.blocks.clone(),
            complete: 0,
        };
        let reduced = part.shards.iter().map(|shards| shards.iter().map(|_| None).collect());
        Gradients {
            buckets: buckets.iter().map(bucket).collect(),
            places,
            shards: part.shards.clone(),
            reduced: reduced.collect(),
            dtype,
        }
    }

    /// The buffer for a block's gradient, and whether it already holds one to add to.
    pub fn block(&mut self, device: &Device, block: usize) -> (ViewMut<'_>, bool) {
        self.allocate(device, block);
        let Place { bucket, start, len, filled } = &mut self.places[block];
        let before = std::mem::replace(filled, true);
        let buffer = self.buckets[*bucket].buffer.as_mut().expect("just allocated");
        (buffer.view_mut().part(*start..*start + *len), before)
    }

    /// [`Gradients::block`] for two different blocks at once.
    pub fn two(
        &mut self,
        device: &Device,
        one: usize,
        other: usize,
    ) -> ((ViewMut<'_>, bool), (ViewMut<'_>, bool)) {
        self.allocate(device, one);
        self.allocate(device, other);
        let before =
            [one, other].map(|block| std::mem::replace(&mut self.places[block].filled, true));
        let (a, b) = (self.places[one].clone(), self.places[other].clone());
        let (one, other) = if a.bucket == b.bucket {
            let buffer = self.buckets[a.bucket].buffer.as_mut().expect("just allocated").view_mut();
            let at = a.start.max(b.start);
            let (low, high) = buffer.split_at(at);
            if a.start < b.start {
                (low.part(a.start..a.start + a.len), high.part(0..b.len))
            } else {
                (high.part(0..a.len), low.part(b.start..b.start + b.len))
            }
        } else {
            let both = self.buckets.get_disjoint_mut([a.bucket, b.bucket]);
            let [first, second] = both
                .expect("two different buckets")
                .map(|bucket| bucket.buffer.as_mut().expect("just allocated").view_mut());
            (first.part(a.start..a.start + a.len), second.part(b.start..b.start + b.len))
        };
        ((one, before[0]), (other, before[1]))
    }

    fn allocate(&mut self, device: &Device, block: usize) {
        let bucket = &mut self.buckets[self.places[block].bucket];
        let (len, dtype) = (bucket.len, self.dtype);
        bucket.buffer.get_or_insert_with(|| device.empty(1, len, dtype, Tag::Gradients));
    }

    /// Whether a block's buffer holds a gradient.
    pub fn filled(&self, block: usize) -> bool {
        self.places[block].filled
    }

    /// The gradient of a block before it is reduced.
    pub fn get(&self, block: usize) -> Option<View<'_>> {
        let Place { bucket, start, len, filled } = &self.places[block];
        let buffer = self.buckets[*bucket].buffer.as_ref().filter(|_| *filled)?;
        Some(buffer.view().part(*start..*start + *len))
    }

    /// The reduced gradient of this rank's shard of a unit.
    pub fn own(&self, block: usize, unit: usize) -> Option<View<'_>> {
        match &self.reduced[block][unit] {
            Some(shard) => Some(shard.view()),
            None => Some(self.get(block)?.part(self.shards[block][unit].own.clone())),
        }
    }

    /// [`Gradients::own`] as a handle of the buffer and a range of it.
    pub(crate) fn own_part(&self, block: usize, unit: usize) -> Option<(Tensor, Range<usize>)> {
        if let Some(shard) = &self.reduced[block][unit] {
            return Some((shard.clone(), 0..shard.len()));
        }
        let (own, place) = (&self.shards[block][unit].own, &self.places[block]);
        let buffer = self.buckets[place.bucket].buffer.as_ref().filter(|_| place.filled)?;
        Some((buffer.clone(), place.start + own.start..place.start + own.end))
    }

    /// [`Gradients::own`], to be changed in place.
    pub fn own_mut(&mut self, block: usize, unit: usize) -> Option<ViewMut<'_>> {
        let own = self.shards[block][unit].own.clone();
        if let Some(shard) = &mut self.reduced[block][unit] {
            return Some(shard.view_mut());
        }
        let Place { bucket, start, filled, .. } = self.places[block].clone();
        let buffer = self.buckets[bucket].buffer.as_mut().filter(|_| filled)?;
        Some(buffer.view_mut().part(start + own.start..start + own.end))
    }

    /// Takes a bucket's buffer out; the next backward pass allocates a new one.
    pub(crate) fn take(&mut self, bucket: usize) -> Option<Tensor> {
        let Bucket { buffer, blocks, complete, .. } = &mut self.buckets[bucket];
        for block in blocks {
            self.places[*block].filled = false;
        }
        *complete = 0;
        buffer.take()
    }

    /// Puts a filled buffer back into its bucket.
    pub(crate) fn put(&mut self, bucket: usize, buffer: Tensor) {
        self.buckets[bucket].buffer = Some(buffer);
        for &block in &self.buckets[bucket].blocks {
            self.places[block].filled = true;
        }
    }

    pub(crate) fn bucket_of(&self, block: usize) -> usize {
        self.places[block].bucket
    }

    /// Frees all gradients.
    pub fn clear(&mut self) {
        (0..self.buckets.len()).for_each(|bucket| drop(self.take(bucket)));
        self.reduced.iter_mut().flatten().for_each(|shard| *shard = None);
    }

    /// The number of blocks on this rank.
    pub fn blocks(&self) -> usize {
        self.places.len()
    }
}
