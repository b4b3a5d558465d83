//! The life of gradient buffers: each from its block's backward pass until it is summed over the replicas. Where they
//! are in bf16, what an operation needs of f32 on its way there is a working buffer, and not counted.

use super::{Usage, overlaps};
use crate::model::{BlockParams, Part, Shard};
use crate::passes::Moment;
use crate::plan::Plan;

struct Block {
    /// All of it, and what is left on this rank of its sum.
    whole: usize,
    own: usize,
    /// Whether they are there.
    begun: bool,
    summed: bool,
    /// Micro-batches whose gradient is in.
    complete: usize,
    /// What goes when the sum that is under way has arrived.
    leaving: usize,
}

/// Bytes of gradients at most.
pub(super) fn peak(plan: &Plan, part: &Part, moments: &[Moment]) -> usize {
    if plan.layout.zero == 0 || part.mesh.replicas() == 1 {
        // Nothing is given up before the optimizer has been there.
        return plan.precision.gradients.bytes() * part.len();
    }
    let mut life = Life::new(plan, part);
    for moment in moments {
        match *moment {
            Moment::Turn { block, table } => {
                table.into_iter().for_each(|table| life.begin(table));
                life.begin(block);
                life.complete(block);
            }
            Moment::Backward { block, later } => {
                life.begin(block);
                if !later {
                    life.complete(block);
                }
            }
            Moment::Weights { block } | Moment::EmbedBackward { block } => {
                life.begin(block);
                life.complete(block);
            }
            _ => {}
        }
    }
    life.end();
    life.usage.peak
}

struct Life {
    blocks: Vec<Block>,
    usage: Usage,
    micros: usize,
    /// Whether each micro-batch is summed by itself: ZeRO-2 and 3, where buffers hold one at a time.
    each: bool,
    /// Whether sums go on beside the computing; then they may arrive as late as when they are needed.
    late: bool,
    /// Those whose sums wait for the end of the pass: of ZeRO-1 all, unless they go on beside it.
    waiting: Option<Vec<usize>>,
}

impl Life {
    fn new(plan: &Plan, part: &Part) -> Life {
        let bytes = plan.precision.gradients.bytes();
        let block = |(params, shards): (&BlockParams, &Vec<Shard>)| Block {
            whole: bytes * params.len(),
            own: bytes * shards.iter().map(|shard| shard.own.len()).sum::<usize>(),
            begun: false,
            summed: false,
            complete: 0,
            leaving: 0,
        };
        let mixed = plan.layout.pipe > 1 && plan.layout.schedule.splits();
        Life {
            blocks: part.blocks.iter().zip(&part.shards).map(block).collect(),
            usage: Usage::default(),
            micros: plan.train.accumulation,
            each: plan.layout.zero >= 2 && !mixed,
            late: overlaps(plan),
            waiting: (plan.layout.zero == 1 && !overlaps(plan)).then(Vec::new),
        }
    }

    fn begin(&mut self, block: usize) {
        let block = &mut self.blocks[block];
        if !std::mem::replace(&mut block.begun, true) {
            self.usage.take(block.whole);
        }
    }

    /// A micro-batch's gradient of a block is there.
    fn complete(&mut self, block: usize) {
        let state = &mut self.blocks[block];
        state.complete += 1;
        if state.complete < self.micros && !self.each {
            return;
        }
        match &mut self.waiting {
            Some(waiting) => waiting.push(block),
            None => self.sum(block),
        }
    }

    /// The pass is over.
    fn end(&mut self) {
        let waiting = self.waiting.take().unwrap_or_default();
        waiting.into_iter().for_each(|block| self.sum(block));
    }

    fn sum(&mut self, block: usize) {
        let Life { blocks, usage, late, .. } = self;
        let block = &mut blocks[block];
        usage.give(std::mem::take(&mut block.leaving));
        // The sum is made beside what it is made of, and beside the sum of earlier micro-batches.
        usage.take(block.own);
        block.leaving = block.whole + if block.summed { block.own } else { 0 };
        (block.begun, block.summed) = (false, true);
        if !*late {
            usage.give(std::mem::take(&mut block.leaving));
        }
    }
}
