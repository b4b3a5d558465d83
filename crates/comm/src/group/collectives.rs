//! The blocking form of every collective, and point-to-point messages.

use crate::call::error::Result;
use crate::call::fold::Op;
use crate::group::Group;
use crate::group::args::CollectiveArgs;
use lockstep_types::{Element, bytes_of, bytes_of_mut};

impl Group {
    /// Reduces `buffer` over all members; all of them get the result.
    ///
    /// ```
    /// # use lockstep_comm::{on_threads, Op};
    /// let sums = on_threads(3, |world| {
    ///     let mut numbers = [world.rank() as f32, 1.0];
    ///     world.all_reduce(&mut numbers, Op::Sum).unwrap();
    ///     numbers
    /// });
    /// assert_eq!(sums, [[3.0, 3.0]; 3]);
    /// ```
    pub fn all_reduce<T: Element>(&self, buffer: &mut [T], op: Op) -> Result<()> {
        self.run::<T>(CollectiveArgs::AllReduce { bytes: bytes_of_mut(buffer), op })
    }

    /// Reduces `buffer` over all members into the root's buffer; the others are unchanged.
    pub fn reduce<T: Element>(&self, buffer: &mut [T], op: Op, root: usize) -> Result<()> {
        self.run::<T>(CollectiveArgs::Reduce { bytes: bytes_of_mut(buffer), op, root })
    }

    /// Reduces `input` over all members; each gets its shard of the result (see [`crate::shard_range`]).
    pub fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: Op) -> Result<()> {
        self.run::<T>(CollectiveArgs::ReduceScatter {
            input: bytes_of(input),
            output: bytes_of_mut(output),
            op,
        })
    }

    /// Concatenates the shards of all members (see [`crate::shard_range`]); all of them get the result.
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.run::<T>(CollectiveArgs::AllGather {
            input: bytes_of(input),
            output: bytes_of_mut(output),
        })
    }

    /// Copies the root's buffer to all members.
    pub fn broadcast<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<()> {
        self.run::<T>(CollectiveArgs::Broadcast { bytes: bytes_of_mut(buffer), root })
    }

    /// Concatenates the inputs of all members at the root. On other members `output` is unchanged and
    /// may be empty.
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<()> {
        let output = if self.rank() == root { output } else { &mut [] };
        self.run::<T>(CollectiveArgs::Gather {
            input: bytes_of(input),
            output: bytes_of_mut(output),
            root,
        })
    }

    /// Sends each member its piece of the root's input. On other members `input` is not read and may be
    /// empty.
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<()> {
        let input = if self.rank() == root { input } else { &[] };
        self.run::<T>(CollectiveArgs::Scatter {
            input: bytes_of(input),
            output: bytes_of_mut(output),
            root,
        })
    }

    /// Sends piece q of `input` to member q and receives piece p of `output` from member p.
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.run::<T>(CollectiveArgs::AllToAll {
            input: bytes_of(input),
            output: bytes_of_mut(output),
        })
    }

    /// Like [`Group::all_to_all`] with pieces of different lengths, consecutive in both buffers: sends
    /// `sent[q]` elements to member q and receives `received[p]` from member p.
    pub fn all_to_all_v<T: Element>(
        &self,
        input: &[T],
        sent: &[usize],
        output: &mut [T],
        received: &[usize],
    ) -> Result<()> {
        self.run::<T>(CollectiveArgs::AllToAllV {
            input: bytes_of(input),
            sent: sent.into(),
            output: bytes_of_mut(output),
            received: received.into(),
        })
    }

    /// Returns when all members have called it.
    pub fn barrier(&self) -> Result<()> {
        self.run::<u8>(CollectiveArgs::Barrier)
    }

    /// Sends `buffer` to a member, which must receive the same number of elements. Messages from one
    /// member to another arrive in order and are independent of collectives.
    pub fn send<T: Element>(&self, buffer: &[T], to: usize) -> Result<()> {
        self.check_peer(to)?;
        self.send_bytes(T::DTYPE, bytes_of(buffer), to)
    }

    /// Receives into `buffer` from a member.
    pub fn receive<T: Element>(&self, buffer: &mut [T], from: usize) -> Result<()> {
        self.check_peer(from)?;
        self.receive_bytes(T::DTYPE, bytes_of_mut(buffer), from)
    }
}
