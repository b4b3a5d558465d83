//! Gradient buffers: each is allocated in its bucket's first backward pass and, with sharded gradients, freed when it
//! has been reduced. Offloaded gradients are freed when the next block's have been computed. Temporary f32 buffers of operations on bf16 gradients are not counted.

use super::Usage;
use crate::passes::PassEvent;
use crate::plan::Plan;
use crate::reduction::{Bucket, Event, RankReductions, StateOp};

/// Peak bytes of gradients.
pub(super) fn peak(plan: &Plan, reductions: &RankReductions, events: &[Event]) -> usize {
    let mut buffers = Buffers::new(plan, reductions);
    for event in events {
        match *event {
            Event::Pass(PassEvent::LossAndBackward { block, table }) => {
                table.into_iter().for_each(|table| buffers.allocate(table));
                buffers.allocate(block);
                buffers.complete(block);
            }
            Event::Pass(PassEvent::Backward { block, deferred: true }) => buffers.allocate(block),
            Event::Pass(
                PassEvent::Backward { block, .. }
                | PassEvent::Weights { block }
                | PassEvent::EmbedBackward { block },
            ) => {
                buffers.allocate(block);
                buffers.complete(block);
            }
            Event::State(call) => {
                if let StateOp::Reduce { bucket, .. } = call.op {
                    buffers.reduce(bucket, call.overlapped);
                }
            }
            Event::Pass(_) => {}
        }
    }
    buffers.usage.peak
}

struct Buffers {
    buckets: Vec<Buffer>,
    /// By block, its bucket.
    bucket_of: Vec<usize>,
    /// Reduced gradients are kept as shards.
    shards: bool,
    /// With gradients that are offloaded in the backward pass: micro-batches of a step.
    offloaded_after: Option<usize>,
    /// By block, micro-batches whose gradient is complete.
    complete: Vec<usize>,
    /// Bytes that are being copied to the host.
    leaving: usize,
    usage: Usage,
}

struct Buffer {
    /// Bytes of the bucket, and of this rank's shard of it.
    whole: usize,
    shard: usize,
    allocated: bool,
    reduced: bool,
    /// Bytes that are freed when the reduction in flight has finished.
    in_flight: usize,
}

impl Buffers {
    fn new(plan: &Plan, reductions: &RankReductions) -> Buffers {
        let bytes = plan.precision.gradients.bytes();
        let buffer = |bucket: &Bucket| {
            let shards = bucket.runs.iter().filter_map(|run| run.shard.as_ref());
            Buffer {
                whole: bytes * bucket.len,
                shard: bytes * shards.map(|(own, _)| own.len()).sum::<usize>(),
                allocated: false,
                reduced: false,
                in_flight: 0,
            }
        };
        let buckets = &reductions.buckets;
        let mut bucket_of = vec![0; buckets.iter().map(|bucket| bucket.blocks.len()).sum()];
        for (number, bucket) in buckets.iter().enumerate() {
            bucket.blocks.iter().for_each(|block| bucket_of[*block] = number);
        }
        let micro_batches = reductions.policy.micro_batches;
        Buffers {
            offloaded_after: reductions.offload_in_backward.then_some(micro_batches),
            complete: vec![0; bucket_of.len()],
            leaving: 0,
            buckets: buckets.iter().map(buffer).collect(),
            bucket_of,
            shards: reductions.policy.shards_gradients(),
            usage: Usage::default(),
        }
    }

    fn allocate(&mut self, block: usize) {
        let buffer = &mut self.buckets[self.bucket_of[block]];
        if !std::mem::replace(&mut buffer.allocated, true) {
            self.usage.take(buffer.whole);
        }
    }

    /// A block's gradient of one micro-batch is complete. After the last one it is copied to the host, when the copy of
    /// the previous block has finished.
    fn complete(&mut self, block: usize) {
        self.complete[block] += 1;
        if self.offloaded_after == Some(self.complete[block]) {
            let buffer = &mut self.buckets[self.bucket_of[block]];
            buffer.allocated = false;
            self.usage.give(std::mem::replace(&mut self.leaving, buffer.whole));
        }
    }

    /// An overlapped reduction may finish as late as when the next one starts.
    fn reduce(&mut self, bucket: usize, overlapped: bool) {
        if !self.shards {
            return;
        }
        let Buffers { buckets, usage, .. } = self;
        for buffer in buckets.iter_mut() {
            usage.give(std::mem::take(&mut buffer.in_flight));
        }
        let buffer = &mut buckets[bucket];
        // The new shard exists together with the whole gradient and with the shard of earlier micro-batches.
        usage.take(buffer.shard);
        buffer.in_flight = buffer.whole + if buffer.reduced { buffer.shard } else { 0 };
        (buffer.allocated, buffer.reduced) = (false, true);
        if !overlapped {
            usage.give(std::mem::take(&mut buffer.in_flight));
        }
    }
}
