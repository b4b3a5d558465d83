//! The reduction of one bucket as a job that any thread can run.

use lockstep_comm::{Group, Op, Result};
use lockstep_kernels::{Device, Tag, Tensor};
use lockstep_plan::GroupKind;
use lockstep_plan::reduction::Bucket;

use crate::compress::Compressor;
use crate::{Gradients, Groups, collectives};

/// A bucket's reduction, ready to run with the device of the thread that runs it.
pub(crate) type Job = Box<dyn FnOnce(&Device) -> Result<Reduced> + Send>;

/// A reduced bucket, and the compressors that reduced it.
pub(crate) struct Reduced {
    pub gradients: Sum,
    pub compressors: Vec<Compressor>,
    /// Tensors that the reduction read. Kept until the device that allocated them has waited for it.
    pub inputs: Vec<Tensor>,
}

pub(crate) enum Sum {
    /// The whole bucket.
    Whole(Tensor),
    /// This rank's shard of each unit.
    Shards(Vec<Tensor>),
}

/// All-reduces a whole bucket. `buffer` holds its gradients.
pub(crate) fn all_reduce(
    groups: &Groups,
    bucket: &Bucket,
    mut buffer: Tensor,
    mut compressors: Vec<Compressor>,
) -> Job {
    let runs: Vec<_> = bucket
        .runs
        .iter()
        .map(|run| (run.range.clone(), groups.group(run.group).clone()))
        .collect();
    Box::new(move |_| {
        for ((range, group), compressor) in runs.into_iter().zip(&mut compressors) {
            compressor.all_reduce(&group, buffer.view_mut().part(range))?;
            // The next call on this group comes in the next step.
            group.release_peer_pages();
        }
        Ok(Reduced { gradients: Sum::Whole(buffer), compressors, inputs: vec![] })
    })
}

/// One unit of a bucket on its way to a shard.
struct ShardReduction {
    range: std::ops::Range<usize>,
    group: Group,
    shard: Tensor,
    /// The shard of earlier micro-batches.
    earlier: Option<Tensor>,
    /// After the last micro-batch, the group of the shard's copies.
    copies: Option<Group>,
}

/// Reduce-scatters each unit of a bucket and adds this rank's shard to that of earlier micro-batches. After the last
/// micro-batch the shard is all-reduced across the copies of hybrid sharding.
pub(crate) fn reduce_scatter(
    device: &Device,
    groups: &Groups,
    gradients: &mut Gradients,
    bucket: &Bucket,
    (buffer, last): (Tensor, bool),
    mut compressors: Vec<Compressor>,
) -> Job {
    let [block] = bucket.blocks[..] else { panic!("a bucket of sharded gradients is one block") };
    let mut units = Vec::with_capacity(bucket.runs.len());
    for (unit, run) in bucket.runs.iter().enumerate() {
        let (own, copies) = run.shard.as_ref().expect("runs of sharded gradients have a shard");
        let copies = groups.group(*copies);
        units.push(ShardReduction {
            range: run.range.clone(),
            group: groups.group(run.group).clone(),
            shard: device.empty(1, own.len(), gradients.dtype, Tag::Gradients),
            earlier: gradients.reduced[block][unit].take(),
            copies: (last && copies.size() > 1).then(|| copies.clone()),
        });
    }
    Box::new(move |device| {
        let (mut shards, mut inputs) = (Vec::with_capacity(units.len()), Vec::new());
        for (unit, compressor) in units.into_iter().zip(&mut compressors) {
            let ShardReduction { range, group, mut shard, earlier, copies } = unit;
            let input = buffer.view().part(range);
            compressor.reduce_scatter(&group, input, shard.view_mut())?;
            if let Some(earlier) = earlier {
                device.add(shard.view_mut(), earlier.view());
                keep(&mut inputs, earlier);
            }
            if let Some(copies) = copies {
                collectives::all_reduce(device, &copies, shard.view_mut(), Op::Sum)?;
            }
            group.release_peer_pages();
            shards.push(shard);
        }
        keep(&mut inputs, buffer);
        Ok(Reduced { gradients: Sum::Shards(shards), compressors, inputs })
    })
}

/// Keeps a tensor that the device may still read. Host memory is read when an operation returns.
fn keep(inputs: &mut Vec<Tensor>, tensor: Tensor) {
    if !tensor.location().is_host_accessible() {
        inputs.push(tensor);
    }
}

/// Takes a bucket's buffer out of `gradients`. Blocks that got no gradient are zero.
pub(crate) fn take_buffer(device: &Device, gradients: &mut Gradients, bucket: usize) -> Tensor {
    for index in 0..gradients.buckets[bucket].blocks.len() {
        let block = gradients.buckets[bucket].blocks[index];
        let (place, filled) = gradients.block(device, block);
        if !filled {
            device.fill(place, 0.0);
        }
    }
    gradients.take(bucket).expect("just allocated")
}

/// The group on whose communication thread reductions run. It has more than one rank, and only reductions use it.
pub(crate) fn home(groups: &Groups) -> &Group {
    let shard = groups.group(GroupKind::Shard);
    if shard.size() > 1 { shard } else { groups.group(GroupKind::Copies) }
}
