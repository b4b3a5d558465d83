//! Reductions of quantized numbers. A number is rounded at most twice: on its way to the rank that owns its shard,
//! and, summed in f32, on its way back. Each rank adds the errors of its own roundings to its residual.

use super::bytes;
use crate::collectives;
use lockstep_comm::{Group, Result, shard_range};
use lockstep_kernels::{Code, Device, Tensor, View, ViewMut};
use std::ops::Range;

pub(super) struct Quantized<'a> {
    pub device: &'a Device,
    pub group: &'a Group,
    pub code: Code,
    pub residual: ViewMut<'a>, // (len), f32
}

/// Bytes of the largest shard. All pieces that are sent have this size, so that a plain all-to-all and all-gather
/// suffice.
pub(super) fn piece_bytes(code: Code, len: usize, ranks: usize) -> usize {
    code.bytes(len.div_ceil(ranks))
}

impl Quantized<'_> {
    /// Sends shards to their owners, and their sums to all ranks.
    pub fn all_reduce(mut self, mut buffer: ViewMut<'_>) -> Result<()> {
        let (own, piece) = (self.own_shard(), self.piece());
        let (mut packed, mut received) = (self.pieces(), self.pieces());
        self.send_shards(buffer.as_view(), &mut packed, &mut received)?;
        self.add_received(&received, buffer.reborrow().part(own.clone()));

        // The own shard of the sum was not rounded yet, and its residual was not used yet.
        let to = packed.view_mut().part(0..self.code.bytes(own.len()));
        let sum = buffer.as_view().part(own.clone());
        self.device.pack(self.code, sum, self.residual.reborrow().part(own), to);
        let own_piece = packed.view().part(0..piece);
        collectives::all_gather(self.device, self.group, own_piece, received.view_mut())?;
        for rank in 0..self.group.size() {
            let shard = self.shard(rank);
            let from = self.packed_shard(&received, rank, shard.len());
            self.device.unpack(self.code, from, buffer.reborrow().part(shard));
        }
        Ok(())
    }

    /// Sends shards to their owners. The sums are not sent, so they keep the precision of f32.
    pub fn reduce_scatter(mut self, input: View<'_>, mut output: ViewMut<'_>) -> Result<()> {
        let own = self.own_shard();
        let (mut packed, mut received) = (self.pieces(), self.pieces());
        self.send_shards(input, &mut packed, &mut received)?;
        self.device.copy(input.part(own.clone()), output.reborrow());
        self.add_received(&received, output.reborrow());
        // The own shard has a residual only after an all-reduce, or from a checkpoint.
        let mut residual = self.residual.part(own);
        self.device.add(output, residual.as_view());
        self.device.fill(residual.reborrow(), 0.0);
        Ok(())
    }

    /// Packs the shards of all other ranks and sends them.
    fn send_shards(
        &mut self,
        x: View<'_>,
        packed: &mut Tensor,
        received: &mut Tensor,
    ) -> Result<()> {
        let piece = self.piece();
        for rank in (0..self.group.size()).filter(|rank| *rank != self.group.rank()) {
            let (shard, start) = (self.shard(rank), rank * piece);
            let to = packed.view_mut().part(start..start + self.code.bytes(shard.len()));
            let residual = self.residual.reborrow().part(shard.clone());
            self.device.pack(self.code, x.part(shard), residual, to);
        }
        collectives::all_to_all(self.device, self.group, packed.view(), received.view_mut())
    }

    /// Adds the shards from all other ranks to the own shard, in rank order.
    fn add_received(&self, received: &Tensor, mut own: ViewMut<'_>) {
        for rank in (0..self.group.size()).filter(|rank| *rank != self.group.rank()) {
            let from = self.packed_shard(received, rank, own.len());
            self.device.add_unpacked(self.code, from, own.reborrow());
        }
    }

    fn packed_shard<'t>(&self, pieces: &'t Tensor, rank: usize, len: usize) -> View<'t> {
        let start = rank * self.piece();
        pieces.view().part(start..start + self.code.bytes(len))
    }

    /// A buffer for one piece of each rank.
    fn pieces(&self) -> Tensor {
        bytes(self.device, self.piece() * self.group.size())
    }

    fn shard(&self, rank: usize) -> Range<usize> {
        shard_range(self.residual.len(), self.group.size(), rank)
    }

    fn own_shard(&self) -> Range<usize> {
        self.shard(self.group.rank())
    }

    fn piece(&self) -> usize {
        piece_bytes(self.code, self.residual.len(), self.group.size())
    }
}
