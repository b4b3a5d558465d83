//! A group's collectives by MPI's own, each one nonblocking and waited for under the watch.
//!
//! Before data moves, all members exchange the words of their calls and compare them: to MPI a
//! disagreement is undefined behaviour, here it is an error on every member that prints both calls.
//! This costs one all-gather of 32 bytes per member and call, about a latency of the library.
//!
//! Results are equal bit by bit on all members: MPI requires that of an all-reduce (MPI 3.1, section
//! 5.9.6), and elsewhere every element is combined in one place. From run to run they are equal as
//! far as the library follows the standard's advice to give equal results for equal inputs in equal
//! order; the tests see that Open MPI does within a run.

use super::communicator::Communicator;
use super::hold::{Hold, Room};
use super::numbers::datatype;
use super::oversight::Oversight;
use super::request::Request;
use crate::call::cut::Cut;
use crate::call::error::{Cause, Error, Failure, Result};
use crate::call::fold::{Fold, Op};
use crate::call::{Call, CallWords};
use crate::group::work::Work;
use crate::health::watch::Watch;
use lockstep_types::Collective;
use lockstep_types::{Dtype, bytes_of};
use mpi::ffi;
use std::ffi::c_int;
use std::sync::Arc;

/// All-reduce, reduce and broadcast go in pieces of this many bytes per member. A piece is still in
/// the caches when it is copied out: 16 MiB on 4 ranks of one busy host took 25 to 30 ms so, and 48 to
/// 96 ms whole (best of 20). It grows with the members so that the steps of a ring, each a part of the
/// piece, stay long beside their latency; that has not been measured on a network.
const PART: usize = 256 << 10;

/// What carries out the collectives of a group over MPI.
pub(crate) struct Engine {
    pub(super) comm: Communicator,
    /// World ranks of the members.
    members: Arc<[usize]>,
    me: usize,
    hold: Hold,
}

impl Engine {
    pub(super) fn new(comm: Communicator, members: Arc<[usize]>, me: usize) -> Engine {
        Engine { comm, members, me, hold: Hold::default() }
    }

    pub(crate) fn perform(&mut self, watch: &Watch, work: Work, dtype: Dtype) -> Result<()> {
        let members = self.members.clone();
        let oversight = Oversight::call(watch, &members);
        check_counts(&work, dtype, watch)?;
        self.agree(watch, &oversight)?;
        self.carry_out(work, dtype, watch, &oversight)
    }

    /// Compares our call with everybody's. When it returns, all members have come.
    pub(super) fn agree(&mut self, watch: &Watch, oversight: &Oversight) -> Result<()> {
        let (own, members) = (watch.call.words(), self.members.clone());
        let sent: Vec<u8> = own.iter().flat_map(|word| word.to_le_bytes()).collect();
        let (comm, bytes) = (self.comm.raw.0, datatype(Dtype::U8));
        let each = sent.len() as c_int;
        let all = self.exchange(oversight, &sent, sent.len() * members.len(), none(), |b, r| {
            // SAFETY: see `exchange`; one call's words go out, everybody's come in.
            unsafe { ffi::MPI_Iallgather(b.out, each, bytes, b.inc, each, bytes, comm, r) }
        })?;
        let words = |bytes: &[u8]| -> CallWords {
            std::array::from_fn(|i| u64::from_le_bytes(std::array::from_fn(|j| bytes[8 * i + j])))
        };
        let calls: Vec<CallWords> = all.chunks_exact(sent.len()).map(words).collect();
        match odd_one(&calls) {
            None => Ok(()),
            Some((odd, usual)) => {
                let text = format!(
                    "ranks disagree in group {}: rank {} calls {}, rank {} calls {}",
                    watch.group_name,
                    members[usual],
                    Call::describe(calls[usual]),
                    members[odd],
                    Call::describe(calls[odd])
                );
                let failure = Failure { guilty: members[odd], cause: Cause::Disagreed, text };
                Err(watch.raise(Some(members[odd]), failure))
            }
        }
    }

    #[expect(
        clippy::undocumented_unsafe_blocks,
        reason = "one reason for all of them, at the top of the match"
    )]
    fn carry_out(
        &mut self,
        work: Work,
        dtype: Dtype,
        watch: &Watch,
        oversight: &Oversight,
    ) -> Result<()> {
        let (me, members, width) = (self.me, self.members.len(), dtype.bytes());
        let (comm, kind) = (self.comm.raw.0, datatype(dtype));
        let count = |bytes: usize| (bytes / width) as c_int;
        let op_of = |engine: &Engine, op: Op| engine.comm.session.ops.find(dtype, op);
        let fold = |op: Op| Fold { dtype, op, ranks: members };
        // SAFETY, for every call below: see `exchange`. The counts cover exactly what was loaded.
        match work {
            // Agreeing has made everybody come.
            Work::Barrier => Ok(()),
            Work::AllReduce { bytes, op } => {
                let with = op_of(self, op);
                for piece in bytes.chunks_mut(piece_of(members)) {
                    let n = count(piece.len());
                    let result =
                        self.exchange(oversight, piece, piece.len(), none(), |b, r| unsafe {
                            ffi::MPI_Iallreduce(b.out, b.inc, n, kind, with, comm, r)
                        })?;
                    piece.copy_from_slice(result);
                    fold(op).finish(piece);
                }
                Ok(())
            }
            Work::Reduce { bytes, op, root } => {
                let (with, to) = (op_of(self, op), root as c_int);
                for piece in bytes.chunks_mut(piece_of(members)) {
                    let n = count(piece.len());
                    let result =
                        self.exchange(oversight, piece, piece.len(), none(), |b, r| unsafe {
                            ffi::MPI_Ireduce(b.out, b.inc, n, kind, with, to, comm, r)
                        })?;
                    if me == root {
                        piece.copy_from_slice(result);
                        fold(op).finish(piece);
                    }
                }
                Ok(())
            }
            Work::ReduceScatter { input, output, op } => {
                let (counts, _) = shares(input.len(), members, width);
                let with = op_of(self, op);
                let result = self.exchange(
                    oversight,
                    input,
                    output.len(),
                    [counts, vec![], vec![], vec![]],
                    |b, r| unsafe {
                        ffi::MPI_Ireduce_scatter(b.out, b.inc, b.counts[0], kind, with, comm, r)
                    },
                )?;
                output.copy_from_slice(result);
                fold(op).finish(output);
                Ok(())
            }
            Work::AllGather { input, output } => {
                let (counts, starts) = shares(output.len(), members, width);
                let n = count(input.len());
                let result = self.exchange(
                    oversight,
                    input,
                    output.len(),
                    [counts, starts, vec![], vec![]],
                    |b, r| unsafe {
                        let [counts, starts, ..] = b.counts;
                        ffi::MPI_Iallgatherv(b.out, n, kind, b.inc, counts, starts, kind, comm, r)
                    },
                )?;
                output.copy_from_slice(result);
                Ok(())
            }
            Work::Broadcast { bytes, root } => {
                let from = root as c_int;
                for piece in bytes.chunks_mut(piece_of(members)) {
                    let n = count(piece.len());
                    // The root only sends, and MPI does not write to its buffer; the others receive.
                    let (send, receive) =
                        if me == root { (&piece[..], 0) } else { (&[][..], piece.len()) };
                    let result =
                        self.exchange(oversight, send, receive, none(), |b, r| unsafe {
                            let buffer = if me == root { b.out.cast_mut() } else { b.inc };
                            ffi::MPI_Ibcast(buffer, n, kind, from, comm, r)
                        })?;
                    if me != root {
                        piece.copy_from_slice(result);
                    }
                }
                Ok(())
            }
            Work::Gather { input, output, root } => {
                let (n, to) = (count(input.len()), root as c_int);
                let result =
                    self.exchange(oversight, input, output.len(), none(), |b, r| unsafe {
                        ffi::MPI_Igather(b.out, n, kind, b.inc, n, kind, to, comm, r)
                    })?;
                output.copy_from_slice(result);
                Ok(())
            }
            Work::Scatter { input, output, root } => {
                let (n, from) = (count(output.len()), root as c_int);
                let result =
                    self.exchange(oversight, input, output.len(), none(), |b, r| unsafe {
                        ffi::MPI_Iscatter(b.out, n, kind, b.inc, n, kind, from, comm, r)
                    })?;
                output.copy_from_slice(result);
                Ok(())
            }
            Work::AllToAll { input, output } => {
                let n = count(input.len() / members);
                let result =
                    self.exchange(oversight, input, output.len(), none(), |b, r| unsafe {
                        ffi::MPI_Ialltoall(b.out, n, kind, b.inc, n, kind, comm, r)
                    })?;
                output.copy_from_slice(result);
                Ok(())
            }
            Work::AllToAllV { input, sent, output, received } => {
                self.agree_on_counts(&sent, &received, watch, oversight)?;
                let (sent, from) = packed(&sent);
                let (received, to) = packed(&received);
                let result = self.exchange(
                    oversight,
                    input,
                    output.len(),
                    [sent, from, received, to],
                    |b, r| unsafe {
                        let [sent, from, received, to] = b.counts;
                        ffi::MPI_Ialltoallv(
                            b.out, sent, from, kind, b.inc, received, to, kind, comm, r,
                        )
                    },
                )?;
                output.copy_from_slice(result);
                Ok(())
            }
        }
    }

    /// What each member sends us must be what we expect of it, or MPI would cut it off.
    fn agree_on_counts(
        &mut self,
        sent: &[usize],
        received: &[usize],
        watch: &Watch,
        oversight: &Oversight,
    ) -> Result<()> {
        let (comm, kind) = (self.comm.raw.0, datatype(Dtype::I64));
        let members = self.members.clone();
        let row: Vec<i64> = sent.iter().map(|n| *n as i64).collect();
        let bytes = size_of_val(&row[..]);
        let announced = self.exchange(oversight, bytes_of(&row), bytes, none(), |b, r| {
            // SAFETY: see `exchange`; one number for each member goes out, and one comes in.
            unsafe { ffi::MPI_Ialltoall(b.out, 1, kind, b.inc, 1, kind, comm, r) }
        })?;
        for (member, theirs) in announced.chunks_exact(8).enumerate() {
            let theirs = i64::from_ne_bytes(std::array::from_fn(|i| theirs[i])) as usize;
            if theirs != received[member] {
                let theirs = format!(
                    "it, too, but sends {theirs} elements to rank {} where {} are expected",
                    watch.rank, received[member]
                );
                return Err(watch.disagreement(members[member], &theirs));
            }
        }
        Ok(())
    }

    /// One operation from start to end: loads the hold, starts what `call` starts, waits, and gives
    /// what was received. The addresses that `call` gets stay valid, and nobody else's, until the
    /// operation has ended, however long that takes; so it is sound to start any collective that
    /// reads and writes no more than was loaded.
    fn exchange(
        &mut self,
        oversight: &Oversight,
        send: &[u8],
        receive: usize,
        counts: [Vec<c_int>; 4],
        call: impl FnOnce(&Room, *mut ffi::MPI_Request) -> c_int,
    ) -> Result<&[u8]> {
        let room = self.hold.load(send, receive, counts);
        let request = Request::start(|r| call(&room, r)).map_err(|what| oversight.failed(what))?;
        request.wait(oversight)?;
        Ok(self.hold.unload(receive))
    }
}

/// The first member whose call differs from what most call, and the first that calls what most do.
/// Everybody looks at the same calls, so everybody names the same two.
fn odd_one(calls: &[CallWords]) -> Option<(usize, usize)> {
    let alike = |i: &usize| calls.iter().filter(|c| **c == calls[*i]).count();
    // Of equally many, the first.
    let usual = (0..calls.len()).rev().max_by_key(alike)?;
    let odd = calls.iter().position(|c| *c != calls[usual])?;
    Some((odd, usual))
}

/// The bytes of a piece, in whole elements of any type and less than MPI can count.
fn piece_of(members: usize) -> usize {
    (PART * members).min(1 << 30)
}

/// MPI counts in 32 bits; only what goes in pieces may be longer.
fn check_counts(work: &Work, dtype: Dtype, watch: &Watch) -> Result<()> {
    let in_pieces =
        matches!(work.kind(), Collective::AllReduce | Collective::Reduce | Collective::Broadcast);
    let most = work.largest() / dtype.bytes();
    if in_pieces || most <= c_int::MAX as usize {
        return Ok(());
    }
    let what = format!(
        "{} in group {}: MPI takes at most {} elements in a call, {most} are given; call it in pieces",
        work.kind().name(),
        watch.group_name,
        c_int::MAX
    );
    Err(Error::Misuse { rank: watch.rank, what })
}

fn none() -> [Vec<c_int>; 4] {
    Default::default()
}

/// Counts and starts of everybody's share of `bytes`, in elements.
fn shares(bytes: usize, members: usize, width: usize) -> (Vec<c_int>, Vec<c_int>) {
    let cut = Cut { count: bytes / width, parts: members, width };
    let share = |i: usize| cut.elements(i);
    let counts = (0..members).map(|i| share(i).len() as c_int).collect();
    (counts, (0..members).map(|i| share(i).start as c_int).collect())
}

/// Counts and starts of pieces side by side, in elements.
fn packed(counts: &[usize]) -> (Vec<c_int>, Vec<c_int>) {
    let starts = counts.iter().scan(0, |at, n| {
        let start = *at;
        *at += *n as c_int;
        Some(start)
    });
    (counts.iter().map(|n| *n as c_int).collect(), starts.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_odd_one_is_who_differs_from_most() {
        let (a, b) = ([1; 4], [2; 4]);
        assert_eq!(odd_one(&[a, a, a]), None);
        assert_eq!(odd_one(&[a, b, b]), Some((0, 1)));
        assert_eq!(odd_one(&[a, b]), Some((1, 0)));
        assert_eq!(odd_one(&[a]), None);
    }
}
