//! Sums of rounded numbers. Every number is rounded at most twice: on its way to the owner of its share, and, added
//! up in f32, on its way back. What either rounding loses stays where it was lost.

use super::{bytes, room};
use lockstep_comm::{Group, Result, shard_range};
use lockstep_kernels::{Code, Device};
use std::ops::Range;

pub(super) struct Work<'a> {
    pub device: &'a Device,
    pub group: &'a Group,
    pub code: Code,
    pub error: &'a mut [f32], // (len)
}

/// Bytes of the largest share. All pieces that travel are as long, so that a plain all-to-all and all-gather do.
pub(super) fn piece(code: Code, len: usize, ranks: usize) -> usize {
    code.bytes(len.div_ceil(ranks))
}

/// Shares to their owners, sums back to everybody.
pub(super) fn all_reduce(mut work: Work, buffer: &mut [f32]) -> Result<()> {
    let (own, piece, all) = (work.own(), work.piece(), work.piece() * work.group.size());
    let (mut out, mut into) = (room(work.device, all), room(work.device, all));
    let (out, into) = (&mut bytes(&mut out)[..all], &mut bytes(&mut into)[..all]);
    deal(&mut work, buffer, out, into)?;
    add_dealt(&work, into, &mut buffer[own.clone()]);

    // Our own part of the sum never was rounded, and our error there was not looked at yet: it joins here.
    let packed = &mut out[..work.code.bytes(own.len())];
    work.device.pack(work.code, &buffer[own.clone()], &mut work.error[own], packed);
    work.group.all_gather(&out[..piece], into)?;
    for (member, piece) in pieces(into, piece) {
        let share = work.share(member);
        let packed = &piece[..work.code.bytes(share.len())];
        work.device.unpack(work.code, packed, &mut buffer[share]);
    }
    Ok(())
}

/// Shares to their owners. Nothing comes back, so the sum stays as f32 has it.
pub(super) fn reduce_scatter(mut work: Work, input: &[f32], output: &mut [f32]) -> Result<()> {
    let (own, all) = (work.own(), work.piece() * work.group.size());
    let (mut out, mut into) = (room(work.device, all), room(work.device, all));
    let (out, into) = (&mut bytes(&mut out)[..all], &mut bytes(&mut into)[..all]);
    deal(&mut work, input, out, into)?;
    output.copy_from_slice(&input[own.clone()]);
    add_dealt(&work, into, output);
    // There is an error of our own share only after an all-reduce, or from a checkpoint.
    for (output, error) in output.iter_mut().zip(&mut work.error[own]) {
        *output += std::mem::take(error);
    }
    Ok(())
}

/// Packs everybody's share but our own, and sends it there.
fn deal(work: &mut Work, x: &[f32], out: &mut [u8], into: &mut [u8]) -> Result<()> {
    let piece = work.piece();
    for member in (0..work.group.size()).filter(|member| *member != work.group.rank()) {
        let share = work.share(member);
        let packed = &mut out[member * piece..][..work.code.bytes(share.len())];
        work.device.pack(work.code, &x[share.clone()], &mut work.error[share], packed);
    }
    work.group.all_to_all(out, into)
}

/// Adds what everybody else sent us to our own, in the order of the members.
fn add_dealt(work: &Work, into: &[u8], own: &mut [f32]) {
    let bytes = work.code.bytes(own.len());
    for (member, piece) in pieces(into, work.piece()) {
        if member != work.group.rank() {
            work.device.add_unpacked(work.code, &piece[..bytes], own);
        }
    }
}

fn pieces(all: &[u8], piece: usize) -> impl Iterator<Item = (usize, &[u8])> {
    // Pieces of an empty buffer are empty, and there is nothing to do with them.
    all.chunks(piece.max(1)).enumerate()
}

impl Work<'_> {
    fn share(&self, member: usize) -> Range<usize> {
        shard_range(self.error.len(), self.group.size(), member)
    }

    fn own(&self) -> Range<usize> {
        self.share(self.group.rank())
    }

    fn piece(&self) -> usize {
        piece(self.code, self.error.len(), self.group.size())
    }
}
