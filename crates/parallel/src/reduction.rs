//! Executes the reduction policy of a rank: reduces its gradients across the replicas of the data axis, when and how
//! `plan` says. Ranks scale their gradients by the tokens of the *global* batch, so the sum is the gradient of its mean.
//!
//! Sent per rank with a ring of P: an all-reduce 2(P-1)/P of a bucket, a reduce-scatter (P-1)/P.

use std::ops::Range;

use lockstep_comm::trace::CommAxis;
use lockstep_comm::{Group, Op, Pending, Result};
use lockstep_kernels::{Device, Event};
use lockstep_plan::Compression;
use lockstep_plan::model::Part;
use lockstep_plan::reduction::{RankReductions, ReductionPolicy, SharedSum, StateOp};

use crate::bucket_job::{self, Job, Reduced, Sum};
use crate::compress::Compressor;
use crate::shared_gradients::SharedGradients;
use crate::store::{StateLog, record};
use crate::{Gradients, Groups};

/// Blocks that a collective covers, each with its range of the block's gradient.
type BlockRanges = Vec<(usize, Range<usize>)>;

/// A started reduction, and the event that ends it on the device of the communication thread.
type Started = Result<(Reduced, Event)>;

/// Executes the reductions of one rank's gradients.
pub struct Reduction {
    reductions: RankReductions,
    /// By bucket and collective.
    pub(crate) block_ranges: Vec<Vec<BlockRanges>>,
    shared: Vec<SharedGradients>,
    /// With overlap: the device of the communication thread.
    background: Option<Device>,
    /// Buckets whose reductions are in flight.
    in_flight: Vec<(usize, Pending<Started>)>,
    /// Complete buckets that are reduced at the end of the passes.
    waiting: Vec<usize>,
    /// By bucket and collective.
    pub(crate) compressors: Vec<Vec<Compressor>>,
    compression: Compression,
    /// This step's gradients are sent uncompressed.
    uncompressed: bool,
    pub(crate) log: Option<StateLog>,
}

impl Reduction {
    pub fn new(
        part: &Part,
        sequence: bool,
        reductions: RankReductions,
        compression: Compression,
    ) -> Reduction {
        let ranges = |bucket: &lockstep_plan::reduction::Bucket| {
            bucket.runs.iter().map(|run| bucket.blocks_of(run, part)).collect()
        };
        let shared = |sum: &SharedSum| SharedGradients::new(*sum, part, sequence);
        Reduction {
            block_ranges: reductions.buckets.iter().map(ranges).collect(),
            shared: reductions.shared.iter().map(shared).collect(),
            reductions,
            background: None,
            in_flight: vec![],
            waiting: vec![],
            compressors: vec![],
            compression,
            uncompressed: false,
            log: None,
        }
    }

    pub fn policy(&self) -> &ReductionPolicy {
        &self.reductions.policy
    }

    /// Allocates the compressors before the first step, so that long-lived buffers do not fragment the pool.
    pub(crate) fn prepare(&mut self, device: &Device, groups: &Groups) {
        if self.policy().reduce.is_some() {
            self.background = self.policy().overlap.then(|| device.background());
            let buckets = 0..self.reductions.buckets.len();
            self.compressors =
                buckets.map(|bucket| self.new_compressors(device, groups, bucket)).collect();
        }
    }

    fn new_compressors(&self, device: &Device, groups: &Groups, bucket: usize) -> Vec<Compressor> {
        let device = self.background.as_ref().unwrap_or(device);
        let runs = self.reductions.buckets[bucket].runs.iter();
        runs.map(|run| {
            let ranks = groups.group(run.group).size();
            Compressor::new(device, self.compression, run.range.len(), ranks)
        })
        .collect()
    }

    /// Begins a step: whether its gradients are sent uncompressed.
    pub fn begin(&mut self, uncompressed: bool) {
        self.uncompressed = uncompressed;
    }

    /// A block's gradient of one micro-batch is complete; `last` is the last micro-batch of the step.
    pub fn complete(
        &mut self,
        device: &Device,
        groups: &Groups,
        gradients: &mut Gradients,
        block: usize,
        last: bool,
    ) {
        if !self.policy().reduces(last) {
            return;
        }
        let number = gradients.bucket_of(block);
        let bucket = &mut gradients.buckets[number];
        bucket.complete += 1;
        if bucket.complete < bucket.blocks.len() {
            return;
        }
        if self.policy().reduces_at_end() {
            return self.waiting.push(number);
        }
        groups.timed(CommAxis::Data, || self.reduce(device, groups, gradients, number, last));
    }

    /// Reduces a complete bucket, or starts its reduction on the communication thread.
    fn reduce(
        &mut self,
        device: &Device,
        groups: &Groups,
        gradients: &mut Gradients,
        number: usize,
        last: bool,
    ) {
        record(&self.log, StateOp::Reduce { bucket: number, last });
        // The shard of an earlier micro-batch must have arrived before it is added to.
        self.collect(device, groups, gradients, Some(number));
        if self.in_flight.len() >= self.policy().max_in_flight() {
            self.collect(device, groups, gradients, None);
        }
        let mut compressors = std::mem::take(&mut self.compressors[number]);
        if compressors.is_empty() {
            // Lost with a reduction that failed.
            compressors = self.new_compressors(device, groups, number);
        }
        compressors.iter_mut().for_each(|one| one.bypass(self.uncompressed));
        let buffer = bucket_job::take_buffer(device, gradients, number);
        let bucket = &self.reductions.buckets[number];
        let job: Job = match self.policy().shards_gradients() {
            false => bucket_job::all_reduce(groups, bucket, buffer, compressors),
            true => {
                let buffer = (buffer, last);
                bucket_job::reduce_scatter(device, groups, gradients, bucket, buffer, compressors)
            }
        };
        match self.background.clone() {
            Some(background) => {
                let ready = device.record();
                let pending = bucket_job::home(groups).start(move |_| {
                    background.wait_for(&ready);
                    let reduced = job(&background);
                    if reduced.is_err() {
                        // The job's tensors are freed, and its operations may still use them.
                        background.synchronize();
                    }
                    reduced.map(|reduced| (reduced, background.record()))
                });
                self.in_flight.push((number, pending));
            }
            None => self.arrived(groups, gradients, number, job(device)),
        }
    }

    /// Finishes a step: reduces the buckets that waited, waits for those in flight, then sums over the other axes.
    pub fn finish(&mut self, device: &Device, groups: &Groups, gradients: &mut Gradients) {
        groups.timed(CommAxis::Data, || {
            for bucket in std::mem::take(&mut self.waiting) {
                self.reduce(device, groups, gradients, bucket, true);
            }
            self.collect(device, groups, gradients, None);
            for shared in &self.shared {
                if shared.sum != SharedSum::Compressed || !self.uncompressed {
                    record(&self.log, StateOp::Sum(shared.sum));
                    groups.record(shared.all_reduce(device, groups, gradients));
                }
            }
        });
    }

    /// Waits for reductions in flight and drops their results, after a failed step.
    pub fn abandon(&mut self) {
        self.waiting.clear();
        for (bucket, pending) in std::mem::take(&mut self.in_flight) {
            // A failed reduction loses its residuals; the run ends with it.
            if let Ok((reduced, done)) = pending.wait() {
                done.wait();
                self.compressors[bucket] = reduced.compressors;
            }
        }
    }

    /// Waits for one bucket's reduction, or for all.
    /// Only the device waits for their end; the host waits until they are enqueued.
    fn collect(
        &mut self,
        device: &Device,
        groups: &Groups,
        gradients: &mut Gradients,
        only: Option<usize>,
    ) {
        for (bucket, pending) in std::mem::take(&mut self.in_flight) {
            if only.is_none_or(|only| only == bucket) {
                let reduced = pending.wait().map(|(reduced, done)| {
                    device.wait_for(&done);
                    reduced
                });
                self.arrived(groups, gradients, bucket, reduced);
            } else {
                self.in_flight.push((bucket, pending));
            }
        }
    }

    fn arrived(
        &mut self,
        groups: &Groups,
        gradients: &mut Gradients,
        bucket: usize,
        reduced: Result<Reduced>,
    ) {
        match reduced {
            Ok(Reduced { gradients: sum, compressors, inputs }) => {
                // The device has waited for the reduction.
                drop(inputs);
                self.compressors[bucket] = compressors;
                match sum {
                    Sum::Whole(buffer) => gradients.put(bucket, buffer),
                    Sum::Shards(shards) => {
                        let block = gradients.buckets[bucket].blocks[0];
                        gradients.reduced[block] = shards.into_iter().map(Some).collect();
                    }
                }
            }
            Err(error) => groups.record(Err(error)),
        }
    }
}

/// Sums a few numbers over the ranks.
pub fn sum(group: &Group, numbers: &mut [f64]) -> Result<()> {
    group.all_reduce(numbers, Op::Sum)
}
