//! Performs a group's collectives with MPI's nonblocking collectives, under the watch.
//!
//! Before data moves, all members all-gather the words of their calls and compare them: for MPI a
//! disagreement is undefined behaviour, here it is an error on every member that contains both calls.
//! This costs one all-gather of 32 bytes per member and call, about one latency of the library.
//!
//! Results are bitwise equal on all members: MPI requires it for all-reduce (MPI 3.1, section 5.9.6), and
//! otherwise every element is combined in one place. They are equal from run to run if the library follows
//! the standard's advice to give equal results for equal inputs in equal order; the tests check that Open
//! MPI does within a run.

use super::communicator::Communicator;
use super::device::DeviceStaging;
use super::numbers::datatype;
use super::request::Request;
use super::staging::{Addresses, StagingBuffers};
use super::supervision::Supervision;
use crate::call::error::{Cause, Error, Failure, Result};
use crate::call::fold::{Fold, Op};
use crate::call::partition::Partition;
use crate::call::{Call, CallWords};
use crate::device::shared::launch::MAX_MEMBERS;
use crate::group::args::{BufferBytes, CollectiveArgs};
use crate::health::watch::Watch;
use lockstep_types::{Collective, Dtype, bytes_of};
use mpi::ffi;
use std::ffi::c_int;
use std::sync::Arc;

/// All-reduce, reduce and broadcast are performed in pieces of this many bytes per member. A piece is still
/// in the caches when it is copied out: 16 MiB on 4 ranks of one busy host took 25 to 30 ms in pieces and 48
/// to 96 ms whole (best of 20). The size grows with the members so that the steps of a ring, each a part of
/// the piece, are long compared with their latency; this has not been measured on a netargs.
const PART: usize = 256 << 10;

/// Performs the collectives of a group over MPI.
pub(crate) struct Engine {
    pub(super) comm: Communicator,
    /// World ranks of the members.
    pub(super) members: Arc<[usize]>,
    pub(super) me: usize,
    buffers: StagingBuffers,
    pub(super) device: DeviceStaging,
}

impl Engine {
    pub(super) fn new(comm: Communicator, members: Arc<[usize]>, me: usize) -> Engine {
        let (buffers, device) = (StagingBuffers::default(), DeviceStaging::default());
        Engine { comm, members, me, buffers, device }
    }

    pub(crate) fn perform(
        &mut self,
        watch: &Watch,
        args: CollectiveArgs,
        dtype: Dtype,
    ) -> Result<()> {
        let members = self.members.clone();
        let supervision = Supervision::call(watch, &members);
        // These are performed in pieces.
        let in_pieces = matches!(
            args.kind(),
            Collective::AllReduce | Collective::Reduce | Collective::Broadcast
        );
        if !in_pieces {
            check_counts(&args, dtype, watch)?;
        }
        self.compare_calls(watch, &supervision)?;
        self.execute(args, dtype, watch, &supervision)
    }

    /// Compares the calls of all members. Also a barrier.
    pub(super) fn compare_calls(&mut self, watch: &Watch, supervision: &Supervision) -> Result<()> {
        let (own, members) = (watch.call.words(), self.members.clone());
        let sent: Vec<u8> = own.iter().flat_map(|word| word.to_le_bytes()).collect();
        let (comm, bytes) = (self.comm.raw.0, datatype(Dtype::U8));
        let each = sent.len() as c_int;
        let all =
            self.exchange(supervision, &sent, sent.len() * members.len(), none(), |b, r| {
                // SAFETY: see `exchange`; sends one call and receives those of all members.
                unsafe { ffi::MPI_Iallgather(b.out, each, bytes, b.inc, each, bytes, comm, r) }
            })?;
        let words = |bytes: &[u8]| -> CallWords {
            std::array::from_fn(|i| u64::from_le_bytes(std::array::from_fn(|j| bytes[8 * i + j])))
        };
        let calls: Vec<CallWords> = all.chunks_exact(sent.len()).map(words).collect();
        match find_disagreement(&calls) {
            None => Ok(()),
            Some((odd, common)) => {
                let text = format!(
                    "ranks disagree in group {}: rank {} calls {}, rank {} calls {}",
                    watch.group_name,
                    members[common],
                    Call::describe(calls[common]),
                    members[odd],
                    Call::describe(calls[odd])
                );
                let failure = Failure { culprit: members[odd], cause: Cause::Disagreed, text };
                Err(watch.raise(Some(members[odd]), failure))
            }
        }
    }

    #[expect(
        clippy::undocumented_unsafe_blocks,
        reason = "one safety comment for all, at the top of the match"
    )]
    fn execute(
        &mut self,
        args: CollectiveArgs,
        dtype: Dtype,
        watch: &Watch,
        supervision: &Supervision,
    ) -> Result<()> {
        let (me, members, width) = (self.me, self.members.len(), dtype.bytes());
        let (comm, kind) = (self.comm.raw.0, datatype(dtype));
        let count = |bytes: usize| (bytes / width) as c_int;
        let op_of = |engine: &Engine, op: Op| engine.comm.session.ops.find(dtype, op);
        let fold = |op: Op| Fold { dtype, op, ranks: members };
        // SAFETY, for every call below: see `exchange`. The counts match the loaded data.
        match args {
            // The comparison of calls is a barrier.
            CollectiveArgs::Barrier => Ok(()),
            CollectiveArgs::AllReduce { bytes, op } => {
                let with = op_of(self, op);
                for piece in bytes.chunks_mut(piece_of(members)) {
                    let n = count(piece.len());
                    let result =
                        self.exchange(supervision, piece, piece.len(), none(), |b, r| unsafe {
                            ffi::MPI_Iallreduce(b.out, b.inc, n, kind, with, comm, r)
                        })?;
                    piece.copy_from_slice(result);
                    fold(op).finish(piece);
                }
                Ok(())
            }
            CollectiveArgs::Reduce { bytes, op, root } => {
                let (with, to) = (op_of(self, op), root as c_int);
                for piece in bytes.chunks_mut(piece_of(members)) {
                    let n = count(piece.len());
                    let result =
                        self.exchange(supervision, piece, piece.len(), none(), |b, r| unsafe {
                            ffi::MPI_Ireduce(b.out, b.inc, n, kind, with, to, comm, r)
                        })?;
                    if me == root {
                        piece.copy_from_slice(result);
                        fold(op).finish(piece);
                    }
                }
                Ok(())
            }
            CollectiveArgs::ReduceScatter { input, output, op } => {
                let (counts, _) = shard_counts(input.len(), members, width);
                let with = op_of(self, op);
                let result = self.exchange(
                    supervision,
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
            CollectiveArgs::AllGather { input, output } => {
                let (counts, starts) = shard_counts(output.len(), members, width);
                let n = count(input.len());
                let result = self.exchange(
                    supervision,
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
            CollectiveArgs::Broadcast { bytes, root } => {
                let from = root as c_int;
                for piece in bytes.chunks_mut(piece_of(members)) {
                    let n = count(piece.len());
                    // The root only sends, and MPI does not write to its buffer; the others receive.
                    let (send, receive) =
                        if me == root { (&piece[..], 0) } else { (&[][..], piece.len()) };
                    let result =
                        self.exchange(supervision, send, receive, none(), |b, r| unsafe {
                            let buffer = if me == root { b.out.cast_mut() } else { b.inc };
                            ffi::MPI_Ibcast(buffer, n, kind, from, comm, r)
                        })?;
                    if me != root {
                        piece.copy_from_slice(result);
                    }
                }
                Ok(())
            }
            CollectiveArgs::Gather { input, output, root } => {
                let (n, to) = (count(input.len()), root as c_int);
                let result =
                    self.exchange(supervision, input, output.len(), none(), |b, r| unsafe {
                        ffi::MPI_Igather(b.out, n, kind, b.inc, n, kind, to, comm, r)
                    })?;
                output.copy_from_slice(result);
                Ok(())
            }
            CollectiveArgs::Scatter { input, output, root } => {
                let (n, from) = (count(output.len()), root as c_int);
                let result =
                    self.exchange(supervision, input, output.len(), none(), |b, r| unsafe {
                        ffi::MPI_Iscatter(b.out, n, kind, b.inc, n, kind, from, comm, r)
                    })?;
                output.copy_from_slice(result);
                Ok(())
            }
            CollectiveArgs::AllToAll { input, output } => {
                let n = count(input.len() / members);
                let result =
                    self.exchange(supervision, input, output.len(), none(), |b, r| unsafe {
                        ffi::MPI_Ialltoall(b.out, n, kind, b.inc, n, kind, comm, r)
                    })?;
                output.copy_from_slice(result);
                Ok(())
            }
            CollectiveArgs::AllToAllV { input, sent, output, received } => {
                self.compare_counts(&sent, &received, watch, supervision)?;
                let (sent, from) = packed(&sent);
                let (received, to) = packed(&received);
                let result = self.exchange(
                    supervision,
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

    /// Checks that each member sends as much as we expect; MPI would truncate the data.
    pub(super) fn compare_counts(
        &mut self,
        sent: &[usize],
        received: &[usize],
        watch: &Watch,
        supervision: &Supervision,
    ) -> Result<()> {
        let (comm, kind) = (self.comm.raw.0, datatype(Dtype::I64));
        let members = self.members.clone();
        let row: Vec<i64> = sent.iter().map(|n| *n as i64).collect();
        let bytes = size_of_val(&row[..]);
        let announced = self.exchange(supervision, bytes_of(&row), bytes, none(), |b, r| {
            // SAFETY: see `exchange`; sends one number to each member and receives one.
            unsafe { ffi::MPI_Ialltoall(b.out, 1, kind, b.inc, 1, kind, comm, r) }
        })?;
        for (member, theirs) in announced.chunks_exact(8).enumerate() {
            let theirs = i64::from_ne_bytes(std::array::from_fn(|i| theirs[i])) as usize;
            if theirs != received[member] {
                let theirs = format!(
                    "the same, but sends {theirs} elements to rank {}, which expects {}",
                    watch.rank, received[member]
                );
                return Err(watch.disagreement(members[member], &theirs));
            }
        }
        Ok(())
    }

    /// Runs one operation: loads the staging buffers, starts the operation with `call`, waits, and returns
    /// the received data. The addresses passed to `call` stay valid and exclusive until the operation has
    /// ended, so it is sound to start any collective that accesses no more than was loaded.
    fn exchange(
        &mut self,
        supervision: &Supervision,
        send: &[u8],
        receive: usize,
        counts: [Vec<c_int>; 4],
        call: impl FnOnce(&Addresses, *mut ffi::MPI_Request) -> c_int,
    ) -> Result<&[u8]> {
        let addresses = self.buffers.load(send, receive, counts);
        let request =
            Request::start(|r| call(&addresses, r)).map_err(|what| supervision.failed(what))?;
        request.wait(supervision)?;
        Ok(self.buffers.unload(receive))
    }
}

/// The first member whose call differs from the most common call, and the first with the common call. All
/// members see the same calls, so all get the same answer.
fn find_disagreement(calls: &[CallWords]) -> Option<(usize, usize)> {
    let count = |i: &usize| calls.iter().filter(|c| **c == calls[*i]).count();
    // The first of several that are equally common.
    let common = (0..calls.len()).rev().max_by_key(count)?;
    let odd = calls.iter().position(|c| *c != calls[common])?;
    Some((odd, common))
}

/// Size of a piece in bytes: whole elements of any type, within the limits of MPI.
fn piece_of(members: usize) -> usize {
    (PART * members).min(1 << 30)
}

/// MPI counts are 32-bit. Shards of a reduction on a GPU have equal lengths, and so one element more for some members.
const MOST_ELEMENTS: usize = c_int::MAX as usize - MAX_MEMBERS;

/// Refuses a call that MPI cannot count.
pub(super) fn check_counts<I: BufferBytes, O: BufferBytes>(
    args: &CollectiveArgs<'_, I, O>,
    dtype: Dtype,
    watch: &Watch,
) -> Result<()> {
    let most = args.largest() / dtype.bytes();
    if most <= MOST_ELEMENTS {
        return Ok(());
    }
    let what = format!(
        "{} in group {}: {most} elements exceed the MPI limit of {MOST_ELEMENTS} per call; split the call",
        args.kind().name(),
        watch.group_name
    );
    Err(Error::Misuse { rank: watch.rank, what })
}

fn none() -> [Vec<c_int>; 4] {
    Default::default()
}

/// Counts and offsets of all shards of `bytes`, in elements.
pub(super) fn shard_counts(bytes: usize, members: usize, width: usize) -> (Vec<c_int>, Vec<c_int>) {
    let shard = |i: usize| Partition::of_bytes(bytes, members, width).elements(i);
    let counts = (0..members).map(|i| shard(i).len() as c_int).collect();
    (counts, (0..members).map(|i| shard(i).start as c_int).collect())
}

/// Counts and offsets of consecutive pieces, in elements.
pub(super) fn packed(counts: &[usize]) -> (Vec<c_int>, Vec<c_int>) {
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
    fn the_minority_call_is_found() {
        let (a, b) = ([1; 4], [2; 4]);
        assert_eq!(find_disagreement(&[a, a, a]), None);
        assert_eq!(find_disagreement(&[a, b, b]), Some((0, 1)));
        assert_eq!(find_disagreement(&[a, b]), Some((1, 0)));
        assert_eq!(find_disagreement(&[a]), None);
    }
}
