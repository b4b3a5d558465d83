//! Sums of rounded numbers. Every number is rounded at most twice: on its way to the owner of its share, and, added
//! up in f32, on its way back. What either rounding loses stays where it was lost.

use super::{bytes, room};
use lockstep_comm::{Group, Result, share};
use lockstep_kernels::{Code, Device};
use std::ops::Range;

pub(super) struct Work<'a> {
    pub device: &'a Device,
    pub group: &'a Group,
    pub code: Code,
    pub error: &'a mut [f32],
}

impl Work<'_> {
    fn share(&self, member: usize) -> Range<usize> {
        share(self.error.len(), self.group.size(), member)
    }

    /// Bytes of the largest share. All pieces that travel are as long, so that a plain all-to-all and all-gather do.
    fn piece(&self) -> usize {
        piece(self.code, self.error.len(), self.group.size())
    }

    /// Where the packed share of a member lies among pieces, and how long it is.
    fn place(&self, member: usize, share: usize) -> Range<usize> {
        let start = member * self.piece();
        start..start + self.code.bytes(self.share(share).len())
    }
}

pub(super) fn piece(code: Code, len: usize, ranks: usize) -> usize {
    code.bytes(len.div_ceil(ranks))
}

/// Shares to their owners, sums back to everybody.
pub(super) fn all_reduce(work: Work, buffer: &mut [f32]) -> Result<()> {
    let (me, members, piece) = (work.group.rank(), work.group.size(), work.piece());
    let (mut out, mut into) =
        (room(work.device, members * piece), room(work.device, members * piece));
    let (out, into) =
        (&mut bytes(&mut out)[..members * piece], &mut bytes(&mut into)[..members * piece]);
    let own = work.share(me);
    deal(&work, buffer, out, into)?;
    add_dealt(&work, into, &mut buffer[own.clone()]);

    // Our own part of the sum never was rounded, and its error was not looked at yet: it joins here.
    let place = work.place(0, me);
    work.device.pack(work.code, &buffer[own.clone()], &mut work.error[own], &mut out[place]);
    work.group.all_gather(&out[..piece], into)?;
    for member in 0..members {
        let place = &into[work.place(member, member)];
        work.device.unpack(work.code, place, &mut buffer[work.share(member)]);
    }
    Ok(())
}

/// Shares to their owners. Nothing comes back, so the sum stays as exact as f32 has it.
pub(super) fn reduce_scatter(work: Work, input: &[f32], output: &mut [f32]) -> Result<()> {
    let (me, members, piece) = (work.group.rank(), work.group.size(), work.piece());
    let (mut out, mut into) =
        (room(work.device, members * piece), room(work.device, members * piece));
    let (out, into) =
        (&mut bytes(&mut out)[..members * piece], &mut bytes(&mut into)[..members * piece]);
    let own = work.share(me);
    deal(&work, input, out, into)?;
    output.copy_from_slice(&input[own.clone()]);
    add_dealt(&work, into, output);
    // There is an error here only after an all-reduce, or from a checkpoint.
    for (output, error) in output.iter_mut().zip(&mut work.error[own]) {
        *output += std::mem::take(error);
    }
    Ok(())
}
