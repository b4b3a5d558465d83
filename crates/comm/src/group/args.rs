//! Arguments of a collective: their validation, and what a call says about them.

use crate::call::fold::Op;
use crate::call::partition::Partition;
use lockstep_types::Collective;
use std::borrow::Cow;

/// A buffer of a collective, in host or device memory.
pub(crate) trait BufferBytes {
    /// Its size in bytes.
    fn len(&self) -> usize;
}

impl BufferBytes for &[u8] {
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }
}

impl BufferBytes for &mut [u8] {
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }
}

/// Arguments that one member passes to a collective. Roots are indices of members. `I` and `O` are buffers that are read
/// and written.
pub(crate) enum CollectiveArgs<'a, I = &'a [u8], O = &'a mut [u8]> {
    AllReduce {
        bytes: O,
        op: Op,
    },
    Reduce {
        bytes: O,
        op: Op,
        root: usize,
    },
    ReduceScatter {
        input: I,
        output: O,
        op: Op,
    },
    AllGather {
        input: I,
        output: O,
    },
    Broadcast {
        bytes: O,
        root: usize,
    },
    Gather {
        input: I,
        output: O,
        root: usize,
    },
    Scatter {
        input: I,
        output: O,
        root: usize,
    },
    AllToAll {
        input: I,
        output: O,
    },
    /// Counts are in elements, one per member.
    AllToAllV {
        input: I,
        sent: Cow<'a, [usize]>,
        output: O,
        received: Cow<'a, [usize]>,
    },
    Barrier,
}

impl CollectiveArgs<'_> {
    /// Performs the collective in a group of one, where it is the identity.
    pub(crate) fn run_alone(self) {
        match self {
            CollectiveArgs::AllReduce { .. }
            | CollectiveArgs::Reduce { .. }
            | CollectiveArgs::Broadcast { .. }
            | CollectiveArgs::Barrier => {}
            CollectiveArgs::ReduceScatter { input, output, .. }
            | CollectiveArgs::AllGather { input, output }
            | CollectiveArgs::Gather { input, output, .. }
            | CollectiveArgs::Scatter { input, output, .. }
            | CollectiveArgs::AllToAll { input, output }
            | CollectiveArgs::AllToAllV { input, output, .. } => output.copy_from_slice(input),
        }
    }
}

impl<I: BufferBytes, O: BufferBytes> CollectiveArgs<'_, I, O> {
    /// Size of this member's larger buffer, in bytes.
    #[cfg(feature = "mpi")]
    pub(crate) fn largest(&self) -> usize {
        match self {
            CollectiveArgs::AllReduce { bytes, .. }
            | CollectiveArgs::Reduce { bytes, .. }
            | CollectiveArgs::Broadcast { bytes, .. } => bytes.len(),
            CollectiveArgs::ReduceScatter { input, output, .. }
            | CollectiveArgs::AllGather { input, output }
            | CollectiveArgs::Gather { input, output, .. }
            | CollectiveArgs::Scatter { input, output, .. }
            | CollectiveArgs::AllToAll { input, output }
            | CollectiveArgs::AllToAllV { input, output, .. } => input.len().max(output.len()),
            CollectiveArgs::Barrier => 0,
        }
    }

    pub(crate) fn kind(&self) -> Collective {
        match self {
            CollectiveArgs::AllReduce { .. } => Collective::AllReduce,
            CollectiveArgs::Reduce { .. } => Collective::Reduce,
            CollectiveArgs::ReduceScatter { .. } => Collective::ReduceScatter,
            CollectiveArgs::AllGather { .. } => Collective::AllGather,
            CollectiveArgs::Broadcast { .. } => Collective::Broadcast,
            CollectiveArgs::Gather { .. } => Collective::Gather,
            CollectiveArgs::Scatter { .. } => Collective::Scatter,
            CollectiveArgs::AllToAll { .. } => Collective::AllToAll,
            CollectiveArgs::AllToAllV { .. } => Collective::AllToAllV,
            CollectiveArgs::Barrier => Collective::Barrier,
        }
    }

    pub(crate) fn op(&self) -> Option<Op> {
        match self {
            CollectiveArgs::AllReduce { op, .. }
            | CollectiveArgs::Reduce { op, .. }
            | CollectiveArgs::ReduceScatter { op, .. } => Some(*op),
            _ => None,
        }
    }

    pub(crate) fn root(&self) -> Option<usize> {
        match self {
            CollectiveArgs::Reduce { root, .. }
            | CollectiveArgs::Broadcast { root, .. }
            | CollectiveArgs::Gather { root, .. }
            | CollectiveArgs::Scatter { root, .. } => Some(*root),
            _ => None,
        }
    }

    /// Size of the call in bytes, counted so that it is equal on all members.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            CollectiveArgs::AllReduce { bytes, .. }
            | CollectiveArgs::Reduce { bytes, .. }
            | CollectiveArgs::Broadcast { bytes, .. } => bytes.len(),
            CollectiveArgs::ReduceScatter { input, .. }
            | CollectiveArgs::Gather { input, .. }
            | CollectiveArgs::AllToAll { input, .. } => input.len(),
            CollectiveArgs::AllGather { output, .. } | CollectiveArgs::Scatter { output, .. } => {
                output.len()
            }
            CollectiveArgs::AllToAllV { .. } | CollectiveArgs::Barrier => 0,
        }
    }

    /// The error in the arguments, if any. Checks only what one member can know.
    pub(crate) fn find_error(&self, me: usize, members: usize, width: usize) -> Option<String> {
        if let Some(root) = self.root().filter(|r| *r >= members) {
            return Some(format!("root {root} is out of range: the group has {members} ranks"));
        }
        let shard = |total: usize| Partition::of_bytes(total, members, width).bytes(me).len();
        let wrong = |what: &str, has: usize, wants: usize| {
            (has != wants)
                .then(|| format!("{what} has {} elements, expected {}", has / width, wants / width))
        };
        match self {
            CollectiveArgs::ReduceScatter { input, output, .. } => {
                wrong("the output", output.len(), shard(input.len()))
            }
            CollectiveArgs::AllGather { input, output } => {
                wrong("the input", input.len(), shard(output.len()))
            }
            CollectiveArgs::Gather { input, output, root } if *root == me => {
                wrong("the root's output", output.len(), input.len() * members)
            }
            CollectiveArgs::Scatter { input, output, root } if *root == me => {
                wrong("the root's input", input.len(), output.len() * members)
            }
            CollectiveArgs::AllToAll { input, output } => {
                let uneven = (input.len() / width) % members;
                (uneven != 0)
                    .then(|| {
                        format!(
                            "{members} ranks do not divide {} elements; use all_to_all_v",
                            input.len() / width
                        )
                    })
                    .or_else(|| wrong("the output", output.len(), input.len()))
            }
            CollectiveArgs::AllToAllV { input, sent, output, received } => {
                let total = |counts: &[usize]| counts.iter().sum::<usize>() * width;
                (sent.len() != members || received.len() != members)
                    .then(|| {
                        format!(
                            "all_to_all_v needs {members} send counts and {members} receive counts"
                        )
                    })
                    .or_else(|| wrong("the input", input.len(), total(sent)))
                    .or_else(|| wrong("the output", output.len(), total(received)))
            }
            _ => None,
        }
    }
}
