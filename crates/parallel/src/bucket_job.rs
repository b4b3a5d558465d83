//! The reduction of one bucket as a job that any thread can run.

use lockstep_comm::{Group, Result};
use lockstep_kernels::{Device, Dtype, Tag, Tensor};
use lockstep_plan::GroupKind;

use crate::bucket_runs::joined_units;
use crate::compress::Compressor;
use crate::{Gradients, Groups, floats};

/// A bucket's reduction, ready to run.
pub(crate) type Job = Box<dyn FnOnce() -> Result<Reduced> + Send>;

/// A reduced bucket, and the compressors that reduced it.
pub(crate) struct Reduced {
    pub gradients: Sum,
    pub compressors: Vec<Compressor>,
}

pub(crate) enum Sum {
    /// The whole bucket.
    Whole(Tensor),
    /// This rank's shard of each unit.
    Shards(Vec<Tensor>),
}

/// ZeRO-0: all-reduces the whole bucket.
pub(crate) fn all_reduce(
    device: &Device,
    groups: &Groups,
    gradients: &mut Gradients,
    bucket: usize,
    mut compressors: Vec<Compressor>,
) -> Job {
    let mut buffer = take_buffer(device, gradients, bucket);
    let runs: Vec<_> = joined_units(gradients, bucket)
        .into_iter()
        .map(|(range, expert)| (range, copies(groups, expert).clone()))
        .collect();
    Box::new(move || {
        for ((range, group), compressor) in runs.into_iter().zip(&mut compressors) {
            let run = buffer.view_mut().part(range);
            match run.dtype() {
                Dtype::F32 => compressor.all_reduce(&group, run.host())?,
                // bf16 gradients travel in two bytes as they are.
                _ => floats::all_reduce(&group, run)?,
            }
            // The next call on this group comes in the next step.
            group.release_peer_pages();
        }
        Ok(Reduced { gradients: Sum::Whole(buffer), compressors })
    })
}

/// ZeRO-1 to 3: reduce-scatters each unit and adds this rank's shard to that of earlier micro-batches. After the last
/// micro-batch the shard is all-reduced across the copies of hybrid sharding.
pub(crate) fn reduce_scatter(
    device: &Device,
    groups: &Groups,
    gradients: &mut Gradients,
    bucket: usize,
    mut compressors: Vec<Compressor>,
    last: bool,
) -> Job {
    let [block] = gradients.buckets[bucket].blocks[..] else {
        panic!("with ZeRO a bucket is one block")
    };
    let buffer = take_buffer(device, gradients, bucket);
    let units: Vec<_> = gradients.shards[block]
        .iter()
        .map(|piece| {
            let shard = device.empty(1, piece.own.len(), gradients.dtype, Tag::Gradients);
            let expert = piece.unit.expert;
            let (sharded, copies) = (sharded(groups, expert), copies(groups, expert));
            (piece.unit.range.clone(), shard, sharded.clone(), copies.clone())
        })
        .collect();
    let earlier: Vec<_> = gradients.shares[block].iter_mut().map(Option::take).collect();
    Box::new(move || {
        let mut shards = Vec::with_capacity(units.len());
        for (((range, mut shard, sharded, copies), earlier), compressor) in
            units.into_iter().zip(earlier).zip(&mut compressors)
        {
            let whole = buffer.view().part(range);
            match whole.dtype() {
                Dtype::F32 => {
                    compressor.reduce_scatter(&sharded, whole.host(), shard.view_mut().host())?
                }
                _ => floats::reduce_scatter(&sharded, whole, shard.view_mut())?,
            }
            if let Some(earlier) = earlier {
                floats::add(shard.view_mut(), earlier.view());
            }
            if last && copies.size() > 1 {
                floats::all_reduce(&copies, shard.view_mut())?;
            }
            sharded.release_peer_pages();
            shards.push(shard);
        }
        Ok(Reduced { gradients: Sum::Shards(shards), compressors })
    })
}

/// A bucket's buffer, out of `gradients`. Blocks that got no gradient are zero.
fn take_buffer(device: &Device, gradients: &mut Gradients, bucket: usize) -> Tensor {
    for index in 0..gradients.buckets[bucket].blocks.len() {
        let block = gradients.buckets[bucket].blocks[index];
        let (place, filled) = gradients.block(device, block);
        if !filled {
            device.fill(place, 0.0);
        }
    }
    gradients.take(bucket).expect("just seen")
}

pub(crate) fn sharded(groups: &Groups, expert: bool) -> &Group {
    groups.group(if expert { GroupKind::ExpertShard } else { GroupKind::Shard })
}

pub(crate) fn copies(groups: &Groups, expert: bool) -> &Group {
    groups.group(if expert { GroupKind::ExpertCopies } else { GroupKind::Copies })
}
