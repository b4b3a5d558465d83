//! Reductions of the top-k elements of each rank, relative to their usual size. They are sent unrounded, with their
//! indices; the others stay in the residual. All ranks add them in rank order, so all get the same bits.

use super::bytes;
use crate::collectives::{self, RowCounts};
use lockstep_comm::{Group, Result, shard_range};
use lockstep_kernels::cpu::top_k::PAIR_BYTES;
use lockstep_kernels::{Device, View, ViewMut};

pub(super) struct TopK<'a> {
    pub device: &'a Device,
    pub group: &'a Group,
    /// Number of elements that each rank sends.
    pub k: usize,
    pub residual: ViewMut<'a>, // (len), f32
    pub squares: ViewMut<'a>,  // (len), f32: mean squares of the elements that were sent
}

impl TopK<'_> {
    /// Sends the top-k elements of every rank to all ranks.
    pub fn all_reduce(self, mut buffer: ViewMut<'_>) -> Result<()> {
        let TopK { device, group, k, residual, squares } = self;
        let mut own = bytes(device, k * PAIR_BYTES);
        let mut all = bytes(device, k * PAIR_BYTES * group.size());
        device.take_topk(buffer.as_view(), residual, squares, own.view_mut());
        collectives::all_gather(device, group, own.view(), all.view_mut())?;
        device.fill(buffer.reborrow(), 0.0);
        device.add_pairs(all.view(), 0, buffer);
        Ok(())
    }

    /// Sends the top-k elements of every rank to the owners of their shards.
    pub fn reduce_scatter(self, input: View<'_>, mut output: ViewMut<'_>) -> Result<()> {
        let TopK { device, group, k, residual, squares } = self;
        let (len, ranks) = (input.len(), group.size());
        let mut own = bytes(device, k * PAIR_BYTES);
        device.take_topk(input, residual, squares, own.view_mut());

        // Pairs are in the order of their indices, so those of one shard are contiguous.
        let below = |index| device.pairs_below(own.view(), index);
        let count = |rank| {
            let shard = shard_range(len, ranks, rank);
            (below(shard.end) - below(shard.start)) as i64
        };
        let sent: Vec<i64> = (0..ranks).map(count).collect();
        let mut received = vec![0i64; ranks];
        group.all_to_all(&sent, &mut received)?;

        let pairs = |counts: &[i64]| counts.iter().map(|count| *count as usize).collect::<Vec<_>>();
        let (sent, received) = (pairs(&sent), pairs(&received));
        let all = received.iter().sum::<usize>();
        let mut arrived = bytes(device, all * PAIR_BYTES);
        let from = own.view().shaped(k, PAIR_BYTES);
        let to = arrived.view_mut().shaped(all, PAIR_BYTES);
        let counts = RowCounts { sent: &sent, received: &received };
        collectives::all_to_all_v(device, group, counts, from, to)?;

        device.fill(output.reborrow(), 0.0);
        device.add_pairs(arrived.view(), shard_range(len, ranks, group.rank()).start, output);
        Ok(())
    }
}
