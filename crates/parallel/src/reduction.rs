//! Reduces gradients across the replicas of the data axis. Ranks scale their gradients by the tokens of the *global*
//! batch, so the sum is the gradient of its mean.
//!
//! | ZeRO | when | collective | sent per rank with a ring |
//! |---|---|---|---|
//! | 0 | last micro-batch, bucket by bucket | all-reduce | 2(P-1)/P of all gradients |
//! | 1 | last micro-batch, block by block | reduce-scatter | (P-1)/P |
//! | 2, 3 | every micro-batch, block by block | reduce-scatter | (P-1)/P each |
//!
//! With overlap, a communication thread reduces buckets during the backward pass. Without it, ZeRO-2 and ZeRO-3 reduce
//! each block immediately, which frees its gradient; ZeRO-0 and ZeRO-1 keep whole gradients anyway and reduce once at
//! the end. With hybrid sharding, each shard is then all-reduced across its copies.

use std::time::{Duration, Instant};

use lockstep_comm::{Group, Op, Result};
use lockstep_kernels::Device;
use lockstep_plan::Compression;
use lockstep_plan::model::BlockParams;

use crate::bucket_job::{self, Job, Reduced, Sum, copies, sharded};
use crate::bucket_runs::joined_units;
use crate::compress::Compressor;
use crate::courier::{Courier, Task};
use crate::shared_gradients::sum_over_other_axes;
use crate::{Gradients, Groups};

/// Executes the reductions of one rank's gradients.
pub struct Reduction {
    /// The communication thread, with overlap.
    courier: Option<Courier>,
    tasks: Vec<(usize, Task<Result<Reduced>>)>,
    /// Complete buckets that are reduced at the end of the passes.
    waiting: Vec<usize>,
    /// One compressor for each collective of each bucket.
    pub(crate) compressors: Vec<Vec<Compressor>>,
    compression: Compression,
    /// Whether this step's gradients are sent uncompressed.
    uncompressed: bool,
    /// Exposed communication: time spent in reductions that was not overlapped with compute.
    pub exposed: Duration,
}

impl Reduction {
    /// `overlap` starts a communication thread.
    pub fn new(overlap: bool, compression: Compression) -> Reduction {
        Reduction {
            courier: overlap.then(|| Courier::new("reduce")),
            tasks: vec![],
            waiting: vec![],
            compressors: vec![],
            compression,
            uncompressed: false,
            exposed: Duration::ZERO,
        }
    }

    /// Allocates the compressors before the first step, so that long-lived buffers do not fragment the pool.
    pub fn prepare(&mut self, device: &Device, groups: &Groups, gradients: &Gradients) {
        if groups.mesh.replicas() == 1 || !self.compressors.is_empty() {
            return;
        }
        let of_bucket = |bucket| self.new_compressors(device, groups, gradients, bucket);
        self.compressors = (0..gradients.buckets.len()).map(of_bucket).collect();
    }

    fn new_compressors(
        &self,
        device: &Device,
        groups: &Groups,
        gradients: &Gradients,
        bucket: usize,
    ) -> Vec<Compressor> {
        // A communication thread computes on a device of its own.
        let device = if self.courier.is_some() { Device::cpu(1) } else { device.clone() };
        let new = |len: usize, group: &Group| {
            Compressor::new(&device, self.compression, len, group.size())
        };
        if gradients.stage == 0 {
            let runs = joined_units(gradients, bucket).into_iter();
            return runs.map(|(run, expert)| new(run.len(), copies(groups, expert))).collect();
        }
        let units = gradients.shards[gradients.buckets[bucket].blocks[0]].iter();
        units.map(|piece| new(piece.unit.range.len(), sharded(groups, piece.unit.expert))).collect()
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
        if groups.mesh.replicas() == 1 || (!last && gradients.stage < 2) {
            return;
        }
        let number = gradients.bucket_of(block);
        let bucket = &mut gradients.buckets[number];
        bucket.complete += 1;
        if bucket.complete < bucket.blocks.len() {
            return;
        }
        // Without a communication thread, whole gradients wait for the end of the passes: ranks that meet once wait
        // for the slowest once, ranks that meet at every bucket wait for the slowest at each.
        if self.courier.is_none() && gradients.stage < 2 {
            return self.waiting.push(number);
        }
        let begun = Instant::now();
        self.reduce(device, groups, gradients, number, last);
        self.exposed += begun.elapsed();
    }

    /// Reduces a complete bucket, or starts its reduction on the communication thread.
    fn reduce(
        &mut self,
        device: &Device,
        groups: &Groups,
        gradients: &mut Gradients,
        bucket: usize,
        last: bool,
    ) {
        // The shard of an earlier micro-batch must have arrived before it is added to.
        self.collect(groups, gradients, Some(bucket));
        self.prepare(device, groups, gradients);
        let mut compressors = std::mem::take(&mut self.compressors[bucket]);
        if compressors.is_empty() {
            // Lost with a reduction that failed.
            compressors = self.new_compressors(device, groups, gradients, bucket);
        }
        compressors.iter_mut().for_each(|one| one.whole_for_now(self.uncompressed));
        let job: Job = match gradients.stage {
            0 => bucket_job::all_reduce(device, groups, gradients, bucket, compressors),
            _ => bucket_job::reduce_scatter(device, groups, gradients, bucket, compressors, last),
        };
        match &self.courier {
            Some(courier) => self.tasks.push((bucket, courier.start(job))),
            None => self.arrived(groups, gradients, bucket, job()),
        }
    }

    /// Finishes a step: reduces the buckets that waited, waits for those in flight, then sums over the other axes.
    pub fn finish(
        &mut self,
        device: &Device,
        groups: &Groups,
        layout: &[BlockParams],
        gradients: &mut Gradients,
    ) {
        let begun = Instant::now();
        for bucket in std::mem::take(&mut self.waiting) {
            self.reduce(device, groups, gradients, bucket, true);
        }
        self.collect(groups, gradients, None);
        let compressed = groups.mesh.replicas() > 1
            && !self.uncompressed
            && self.compression.depends_on_neighbours();
        sum_over_other_axes(device, groups, layout, gradients, compressed);
        self.exposed += begun.elapsed();
    }

    /// Waits for reductions in flight and drops their results, after a failed step.
    pub fn abandon(&mut self) {
        self.waiting.clear();
        for (bucket, task) in std::mem::take(&mut self.tasks) {
            // A failed reduction loses its residuals; the run ends with it.
            if let Ok(reduced) = task.wait() {
                self.compressors[bucket] = reduced.compressors;
            }
        }
    }

    /// Waits for one bucket's reduction, or for all.
    fn collect(&mut self, groups: &Groups, gradients: &mut Gradients, only: Option<usize>) {
        for (bucket, task) in std::mem::take(&mut self.tasks) {
            if only.is_none_or(|only| only == bucket) {
                self.arrived(groups, gradients, bucket, task.wait());
            } else {
                self.tasks.push((bucket, task));
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
            Ok(Reduced { gradients: sum, compressors }) => {
                self.compressors[bucket] = compressors;
                match sum {
                    Sum::Whole(buffer) => gradients.put(bucket, buffer),
                    Sum::Shards(shards) => {
                        let block = gradients.buckets[bucket].blocks[0];
                        gradients.shares[block] = shards.into_iter().map(Some).collect();
                    }
                }
            }
            Err(error) => groups.note(Err(error)),
        }
    }
}

/// Sums a few numbers over the ranks.
pub fn sum(group: &Group, numbers: &mut [f64]) -> Result<()> {
    group.all_reduce(numbers, Op::Sum)
}
