//! The data axis: replicas train on their own parts of the global batch, and sum their gradients, while the
//! backward pass goes on if somebody else can do it. Ranks scale their gradients by the tokens of the *global*
//! batch, so the sum is the gradient of its mean.
//!
//! | ZeRO | when | what | sent per rank, where the algorithm is a ring |
//! |---|---|---|---|
//! | 0 | last micro-batch, bucket by bucket | all-reduce | 2(P-1)/P of all gradients |
//! | 1 | last micro-batch, block by block | reduce-scatter | (P-1)/P |
//! | 2, 3 | every micro-batch, block by block | reduce-scatter | (P-1)/P each |
//!
//! A courier does so beside the backward pass. Without one, ZeRO-2 and 3 exchange at once, which frees memory; the
//! others when the pass is over, as they keep whole gradients anyway.
//!
//! With hybrid sharding the run that is left is then all-reduced among its copies.

use std::ops::Range;
use std::time::{Duration, Instant};

use lockstep_comm::{Group, Op, Result};
use lockstep_kernels::{Device, Dtype, Tag, Tensor};
use lockstep_plan::model::{BlockParams, Param, Split};
use lockstep_plan::{Compression, GroupKind};

use crate::compress::{Compressor, Memory};
use crate::courier::{Courier, Task};
use crate::{Gradients, Groups, floats};

/// Sums gradients over the replicas.
pub struct Reduction {
    /// Where the wire does the work, exchanges go on beside the backward pass.
    courier: Option<Courier>,
    tasks: Vec<(usize, Task<Result<Reduced>>)>,
    /// Complete buckets that wait for the others, where nothing is gained by summing them sooner.
    waiting: Vec<usize>,
    /// What sums each run of each bucket; made when it is first needed.
    sums: Vec<Vec<Compressor>>,
    how: Compression,
    /// Whether the step's gradients travel whole all the same.
    whole: bool,
    /// Time that the rank spent on exchanges instead of computing.
    pub exposed: Duration,
}

/// What is left of a bucket, and what has summed it.
struct Reduced {
    left: Left,
    sums: Vec<Compressor>,
}

enum Left {
    /// All of it, summed.
    Whole(Tensor),
    /// This rank's run of each unit.
    Shares(Vec<Tensor>),
}

impl Reduction {
    /// `overlap` lets a thread of its own exchange while the rank computes.
    pub fn new(overlap: bool, how: Compression) -> Reduction {
        let courier = overlap.then(|| Courier::new("reduce"));
        Reduction {
            courier,
            tasks: vec![],
            waiting: vec![],
            sums: vec![],
            how,
            whole: false,
            exposed: Duration::ZERO,
        }
    }

    /// Makes what sums gradients, before a step does: what stays should not lie among what comes and goes.
    pub fn prepare(&mut self, device: &Device, groups: &Groups, gradients: &Gradients) {
        if groups.mesh.replicas() == 1 {
            return;
        }
        for bucket in 0..gradients.buckets.len() {
            let sums = self.take_sums(device, groups, gradients, bucket);
            self.sums[bucket] = sums;
        }
    }

    /// Before a step: whether its gradients travel whole, whatever the compression.
    pub fn begin(&mut self, whole: bool) {
        self.whole = whole;
    }

    /// A block's gradient of a micro-batch, maybe the `last` of the step, is complete.
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
        // Whole gradients may stay where they are until the step is over. If this thread is to sum them, it does so
        // then: ranks that meet once wait for the slower one, and those that meet at every bucket wait for whoever
        // happens to be slower at each.
        if self.courier.is_none() && gradients.stage < 2 {
            return self.waiting.push(number);
        }
        let begun = Instant::now();
        self.exchange(device, groups, gradients, number, last);
        self.exposed += begun.elapsed();
    }

    /// Sums a complete bucket, or lets the courier do so.
    fn exchange(
        &mut self,
        device: &Device,
        groups: &Groups,
        gradients: &mut Gradients,
        number: usize,
        last: bool,
    ) {
        // An earlier micro-batch's must have arrived before its share is added to.
        self.collect(groups, gradients, Some(number));
        let mut sums = self.take_sums(device, groups, gradients, number);
        sums.iter_mut().for_each(|sum| sum.whole_for_now(self.whole));
        let job = match gradients.stage {
            0 => whole(device, groups, gradients, number, sums),
            _ => shares(device, groups, gradients, number, sums, last),
        };
        match &self.courier {
            Some(courier) => self.tasks.push((number, courier.start(job))),
            None => self.arrived(groups, gradients, number, job()),
        }
    }

    /// When all are complete: sums what has waited for this, waits for what is under way, then sums what ranks
    /// of the other axes have parts of. Where compression gave copies of a parameter different gradients, those of
    /// the first rank count.
    pub fn finish(
        &mut self,
        device: &Device,
        groups: &Groups,
        layout: &[BlockParams],
        gradients: &mut Gradients,
    ) {
        let begun = Instant::now();
        for number in std::mem::take(&mut self.waiting) {
            self.exchange(device, groups, gradients, number, true);
        }
        self.collect(groups, gradients, None);
        let tensor = groups.group(GroupKind::Tensor);
        let compressed = groups.mesh.replicas() > 1 && !self.whole;
        if tensor.size() > 1 && compressed && self.how.goes_by_neighbours() {
            let adds = tensor.rank() == 0;
            groups.note(sum_of(device, tensor, layout, gradients, adds, |param| {
                param.same_on_tensor(groups.sequence)
            }));
        }
        if groups.sequence {
            groups.note(sum_of(device, tensor, layout, gradients, true, |param| {
                param.split == Split::Norm
            }));
        }
        if groups.mesh.keys > 1 {
            let kind = groups.group(GroupKind::Keys);
            groups.note(sum_of(device, kind, layout, gradients, true, |param| {
                param.split == Split::Keys
            }));
        }
        let ends = groups.group(GroupKind::Ends);
        if ends.size() > 1 {
            groups.note(sum_of(device, ends, layout, gradients, true, |param| param.tied));
        }
        self.exposed += begun.elapsed();
    }

    /// Lets what is under way come to its end, and forgets it: a step was given up.
    pub fn abandon(&mut self) {
        self.waiting.clear();
        for (bucket, task) in std::mem::take(&mut self.tasks) {
            // What had not been sent goes with a failed exchange: the run ends with it.
            if let Ok(reduced) = task.wait() {
                self.sums[bucket] = reduced.sums;
            }
        }
    }

    /// Takes over what is done: of one bucket, or of all.
    fn collect(&mut self, groups: &Groups, gradients: &mut Gradients, only: Option<usize>) {
        for (bucket, task) in std::mem::take(&mut self.tasks) {
            if only.is_none_or(|only| only == bucket) {
                self.arrived(groups, gradients, bucket, task.wait());
            } else {
                self.tasks.push((bucket, task));
            }
        }
    }

    /// Takes over what an exchange left.
    fn arrived(
        &mut self,
        groups: &Groups,
        gradients: &mut Gradients,
        bucket: usize,
        reduced: Result<Reduced>,
    ) {
        match reduced {
            Ok(Reduced { left, sums }) => {
                self.sums[bucket] = sums;
                match left {
                    Left::Whole(buffer) => gradients.put(bucket, buffer),
                    Left::Shares(shares) => {
                        let block = gradients.buckets[bucket].blocks[0];
                        gradients.shares[block] = shares.into_iter().map(Some).collect();
                    }
                }
            }
            Err(error) => groups.note(Err(error)),
        }
    }

    /// What this rank remembers of its gradients from step to step: block, where in its flat buffer, and how much.
    /// State of the training where they are compressed, otherwise nothing.
    pub fn remembered<'a>(
        &'a self,
        gradients: &'a Gradients,
        what: Memory,
    ) -> impl Iterator<Item = (usize, Range<usize>, &'a [f32])> {
        let sums = self.sums.iter().enumerate();
        sums.flat_map(|(bucket, sums)| summed(gradients, bucket).into_iter().zip(sums)).flat_map(
            move |(runs, sum)| {
                let values = sum.remembered(what);
                runs.into_iter().scan(0, move |at, (block, run)| taken(values, at, block, run))
            },
        )
    }

    /// Takes it over from elsewhere: `fill` is called for each run of each block of which something is remembered.
    pub fn remember(
        &mut self,
        device: &Device,
        groups: &Groups,
        gradients: &Gradients,
        what: Memory,
        mut fill: impl FnMut(usize, Range<usize>, &mut [f32]),
    ) {
        self.prepare(device, groups, gradients);
        for bucket in 0..self.sums.len() {
            for (runs, sum) in summed(gradients, bucket).into_iter().zip(&mut self.sums[bucket]) {
                // Alone with its experts a rank owes nobody.
                let mut rest = sum.remembered_mut(what);
                for (block, run) in runs {
                    let Some((now, later)) = rest.split_at_mut_checked(run.len()) else { break };
                    fill(block, run, now);
                    rest = later;
                }
            }
        }
    }

    /// What sums each run of a bucket: it remembers what was not sent.
    fn take_sums(
        &mut self,
        device: &Device,
        groups: &Groups,
        gradients: &Gradients,
        bucket: usize,
    ) -> Vec<Compressor> {
        if self.sums.len() <= bucket {
            self.sums.resize_with(gradients.buckets.len(), Vec::new);
        }
        let sums = std::mem::take(&mut self.sums[bucket]);
        if !sums.is_empty() {
            return sums;
        }
        // Beside the rank's own computing only a device of one's own will do.
        let device = if self.courier.is_some() { Device::cpu(1) } else { device.clone() };
        let sum = |len: usize, group: &Group| Compressor::new(&device, self.how, len, group.size());
        if gradients.stage == 0 {
            let runs = joined(gradients, bucket).into_iter();
            return runs.map(|(run, expert)| sum(run.len(), copies(groups, expert))).collect();
        }
        let units = gradients.shards[gradients.buckets[bucket].blocks[0]].iter();
        units.map(|piece| sum(piece.unit.range.len(), shard(groups, piece.unit.expert))).collect()
    }
}

/// The next run of what is remembered, if anything is remembered there at all.
fn taken<'a>(
    all: &'a [f32],
    at: &mut usize,
    block: usize,
    run: Range<usize>,
) -> Option<(usize, Range<usize>, &'a [f32])> {
    let values = all.get(*at..*at + run.len())?;
    *at += run.len();
    Some((block, run, values))
}

/// Of each run of a bucket that is summed by itself, the runs of blocks that it is made of.
fn summed(gradients: &Gradients, bucket: usize) -> Vec<Vec<(usize, Range<usize>)>> {
    let blocks = &gradients.buckets[bucket].blocks;
    if gradients.stage > 0 {
        let block = blocks[0];
        return gradients.shards[block]
            .iter()
            .map(|piece| vec![(block, piece.unit.range.clone())])
            .collect();
    }
    let of_block = |run: &Range<usize>, block: usize| {
        let (start, len) = (gradients.start_of(block), gradients.len_of(block));
        let (from, to) = (run.start.max(start), run.end.min(start + len));
        (from < to).then(|| (block, from - start..to - start))
    };
    let of_run = |(run, _): (Range<usize>, bool)| {
        blocks.iter().filter_map(|block| of_block(&run, *block)).collect()
    };
    joined(gradients, bucket).into_iter().map(of_run).collect()
}

/// An exchange, ready to be carried out.
type Job = Box<dyn FnOnce() -> Result<Reduced> + Send>;

/// Plain replicas: the whole bucket is summed.
fn whole(
    device: &Device,
    groups: &Groups,
    gradients: &mut Gradients,
    number: usize,
    mut sums: Vec<Compressor>,
) -> Job {
    let mut buffer = complete_buffer(device, gradients, number);
    let ranges: Vec<_> = joined(gradients, number)
        .into_iter()
        .map(|(range, expert)| (range, copies(groups, expert).clone()))
        .collect();
    Box::new(move || {
        for ((range, group), sum) in ranges.into_iter().zip(&mut sums) {
            let run = buffer.view_mut().part(range);
            match run.dtype() {
                Dtype::F32 => sum.all_reduce(&group, run.host())?,
                // What is kept in two bytes travels in two bytes.
                _ => floats::all_reduce(&group, run)?,
            }
            // Until the next step nobody looks at it again.
            group.let_go();
        }
        Ok(Reduced { left: Left::Whole(buffer), sums })
    })
}

/// ZeRO: of each unit this rank's run is summed, and added to what earlier micro-batches left.
fn shares(
    device: &Device,
    groups: &Groups,
    gradients: &mut Gradients,
    number: usize,
    mut sums: Vec<Compressor>,
    last: bool,
) -> Job {
    let [block] = gradients.buckets[number].blocks[..] else {
        panic!("ZeRO's shares are exchanged block by block")
    };
    let buffer = complete_buffer(device, gradients, number);
    let units: Vec<_> = gradients.shards[block]
        .iter()
        .map(|piece| {
            let fresh = device.empty(1, piece.own.len(), gradients.dtype, Tag::Gradients);
            let expert = piece.unit.expert;
            let (shard, copies) = (shard(groups, expert), copies(groups, expert));
            (piece.unit.range.clone(), fresh, shard.clone(), copies.clone())
        })
        .collect();
    let before: Vec<_> = gradients.shares[block].iter_mut().map(Option::take).collect();
    Box::new(move || {
        let mut shares = Vec::with_capacity(units.len());
        for (((range, mut share, shard, copies), before), sum) in
            units.into_iter().zip(before).zip(&mut sums)
        {
            let whole = buffer.view().part(range);
            match whole.dtype() {
                Dtype::F32 => sum.reduce_scatter(&shard, whole.host(), share.view_mut().host())?,
                _ => floats::reduce_scatter(&shard, whole, share.view_mut())?,
            }
            if let Some(before) = before {
                floats::add(share.view_mut(), before.view());
            }
            if last && copies.size() > 1 {
                floats::all_reduce(&copies, share.view_mut())?;
            }
            shard.let_go();
            shares.push(share);
        }
        Ok(Reduced { left: Left::Shares(shares), sums })
    })
}

/// A bucket's buffer; what got no gradient counts as nought.
fn complete_buffer(device: &Device, gradients: &mut Gradients, number: usize) -> Tensor {
    for index in 0..gradients.buckets[number].blocks.len() {
        let block = gradients.buckets[number].blocks[index];
        let (place, filled) = gradients.block(device, block);
        if !filled {
            device.fill(place, 0.0);
        }
    }
    gradients.take(number).expect("just seen")
}

fn shard(groups: &Groups, expert: bool) -> &Group {
    groups.group(if expert { GroupKind::ExpertShard } else { GroupKind::Shard })
}

fn copies(groups: &Groups, expert: bool) -> &Group {
    groups.group(if expert { GroupKind::ExpertCopies } else { GroupKind::Copies })
}

/// The runs of a bucket that are exchanged alike, neighbours joined.
fn joined(gradients: &Gradients, number: usize) -> Vec<(Range<usize>, bool)> {
    let mut runs: Vec<(Range<usize>, bool)> = Vec::new();
    for &block in &gradients.buckets[number].blocks {
        let start = gradients.start_of(block);
        for piece in &gradients.shards[block] {
            let range = start + piece.unit.range.start..start + piece.unit.range.end;
            match runs.last_mut() {
                Some((run, expert)) if *expert == piece.unit.expert && run.end == range.start => {
                    run.end = range.end
                }
                _ => runs.push((range, piece.unit.expert)),
            }
        }
    }
    runs
}

/// Sums over a group the runs of some parameters' gradients, all in one exchange, of those ranks that `add` theirs.
fn sum_of(
    device: &Device,
    group: &Group,
    layout: &[BlockParams],
    gradients: &mut Gradients,
    adds: bool,
    which: impl Fn(&Param) -> bool,
) -> Result<()> {
    // Where they lie: block, unit, and the run within what this rank has of it.
    let mut runs = Vec::new();
    for (block, params) in layout.iter().enumerate() {
        for (unit, piece) in gradients.shards[block].iter().enumerate() {
            for (start, param) in params.placed().filter(|(_, param)| which(param)) {
                if let Some(run) = piece.within(start..start + param.len()) {
                    runs.push((block, unit, run));
                }
            }
        }
    }
    let len = runs.iter().map(|(_, _, run)| run.len()).sum();
    let mut all = device.zeros(1, len, gradients.dtype, Tag::Buffers);
    let mut at = 0;
    for (block, unit, run) in &runs {
        let to = all.view_mut().part(at..at + run.len());
        if let Some(own) = gradients.own(*block, *unit).filter(|_| adds) {
            device.copy(own.part(run.clone()), to);
        }
        at += run.len();
    }
    floats::all_reduce(group, all.view_mut())?;
    let mut at = 0;
    for (block, unit, run) in runs {
        if let Some(own) = gradients.own_mut(block, unit) {
            device.copy(all.view().part(at..at + run.len()), own.part(run.clone()));
        }
        at += run.len();
    }
    Ok(())
}

/// Sums a few numbers over the ranks.
pub fn sum(group: &Group, numbers: &mut [f64]) -> Result<()> {
    group.all_reduce(numbers, Op::Sum)
}
