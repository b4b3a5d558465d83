//! A collective as its arguments: checked, described as a call, and handed to the algorithm that was
//! chosen. The one place where the kinds of collectives are told apart.

use crate::algo::direct::Routes;
use crate::algo::{Team, direct, flat, halving, ring, tree, two_level};
use crate::call::Algo;
use crate::call::cut::Cut;
use crate::call::error::Result;
use crate::call::fold::{Fold, Op};
use crate::group::lane::Lane;
use crate::memory::scratch::Scratch;
use lockstep_types::Collective;
use lockstep_types::Dtype;
use std::borrow::Cow;
use std::ops::Range;

/// What one member brings to a collective. All lengths are in bytes, all roots are members.
pub(crate) enum Work<'a> {
    AllReduce {
        bytes: &'a mut [u8],
        op: Op,
    },
    Reduce {
        bytes: &'a mut [u8],
        op: Op,
        root: usize,
    },
    ReduceScatter {
        input: &'a [u8],
        output: &'a mut [u8],
        op: Op,
    },
    AllGather {
        input: &'a [u8],
        output: &'a mut [u8],
    },
    Broadcast {
        bytes: &'a mut [u8],
        root: usize,
    },
    Gather {
        input: &'a [u8],
        output: &'a mut [u8],
        root: usize,
    },
    Scatter {
        input: &'a [u8],
        output: &'a mut [u8],
        root: usize,
    },
    AllToAll {
        input: &'a [u8],
        output: &'a mut [u8],
    },
    /// Counts are in elements, one per member.
    AllToAllV {
        input: &'a [u8],
        sent: Cow<'a, [usize]>,
        output: &'a mut [u8],
        received: Cow<'a, [usize]>,
    },
    Barrier,
}

impl Work<'_> {
    pub(crate) fn kind(&self) -> Collective {
        match self {
            Work::AllReduce { .. } => Collective::AllReduce,
            Work::Reduce { .. } => Collective::Reduce,
            Work::ReduceScatter { .. } => Collective::ReduceScatter,
            Work::AllGather { .. } => Collective::AllGather,
            Work::Broadcast { .. } => Collective::Broadcast,
            Work::Gather { .. } => Collective::Gather,
            Work::Scatter { .. } => Collective::Scatter,
            Work::AllToAll { .. } => Collective::AllToAll,
            Work::AllToAllV { .. } => Collective::AllToAllV,
            Work::Barrier => Collective::Barrier,
        }
    }

    /// A group of one is the identity.
    fn alone(self) {
        match self {
            Work::AllReduce { .. }
            | Work::Reduce { .. }
            | Work::Broadcast { .. }
            | Work::Barrier => {}
            Work::ReduceScatter { input, output, .. }
            | Work::AllGather { input, output }
            | Work::Gather { input, output, .. }
            | Work::Scatter { input, output, .. }
            | Work::AllToAll { input, output }
            | Work::AllToAllV { input, output, .. } => output.copy_from_slice(input),
        }
    }

    pub(crate) fn op(&self) -> Option<Op> {
        match self {
            Work::AllReduce { op, .. }
            | Work::Reduce { op, .. }
            | Work::ReduceScatter { op, .. } => Some(*op),
            _ => None,
        }
    }

    pub(crate) fn root(&self) -> Option<usize> {
        match self {
            Work::Reduce { root, .. }
            | Work::Broadcast { root, .. }
            | Work::Gather { root, .. }
            | Work::Scatter { root, .. } => Some(*root),
            _ => None,
        }
    }

    /// The bytes that say how large the call is, in the sense that is equal on all members.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Work::AllReduce { bytes, .. }
            | Work::Reduce { bytes, .. }
            | Work::Broadcast { bytes, .. } => bytes.len(),
            Work::ReduceScatter { input, .. }
            | Work::Gather { input, .. }
            | Work::AllToAll { input, .. } => input.len(),
            Work::AllGather { output, .. } | Work::Scatter { output, .. } => output.len(),
            Work::AllToAllV { .. } | Work::Barrier => 0,
        }
    }

    /// The bytes of the larger buffer of this member.
    #[cfg(feature = "mpi")]
    pub(crate) fn largest(&self) -> usize {
        match self {
            Work::AllReduce { bytes, .. }
            | Work::Reduce { bytes, .. }
            | Work::Broadcast { bytes, .. } => bytes.len(),
            Work::ReduceScatter { input, output, .. }
            | Work::AllGather { input, output }
            | Work::Gather { input, output, .. }
            | Work::Scatter { input, output, .. }
            | Work::AllToAll { input, output }
            | Work::AllToAllV { input, output, .. } => input.len().max(output.len()),
            Work::Barrier => 0,
        }
    }

    /// What is wrong with the arguments, if anything is, whatever the others bring.
    pub(crate) fn mistake(&self, me: usize, members: usize, width: usize) -> Option<String> {
        if let Some(root) = self.root().filter(|r| *r >= members) {
            return Some(format!("root {root} is none of the {members} members"));
        }
        let share =
            |total: usize| Cut { count: total / width, parts: members, width }.bytes(me).len();
        let wrong = |what: &str, has: usize, wants: usize| {
            (has != wants).then(|| {
                format!("{what} has {} elements, {} are needed", has / width, wants / width)
            })
        };
        match self {
            Work::ReduceScatter { input, output, .. } => {
                wrong("the output of this member", output.len(), share(input.len()))
            }
            Work::AllGather { input, output } => {
                wrong("the input of this member", input.len(), share(output.len()))
            }
            Work::Gather { input, output, root } if *root == me => {
                wrong("the root's output", output.len(), input.len() * members)
            }
            Work::Scatter { input, output, root } if *root == me => {
                wrong("the root's input", input.len(), output.len() * members)
            }
            Work::AllToAll { input, output } => {
                let uneven = (input.len() / width) % members;
                (uneven != 0)
                    .then(|| {
                        format!(
                            "{} elements do not split over {members} members; use all_to_all_v",
                            input.len() / width
                        )
                    })
                    .or_else(|| wrong("the output", output.len(), input.len()))
            }
            Work::AllToAllV { input, sent, output, received } => {
                let total = |counts: &[usize]| counts.iter().sum::<usize>() * width;
                (sent.len() != members || received.len() != members)
                    .then(|| format!("all_to_all_v needs {members} counts to send and to receive"))
                    .or_else(|| wrong("the input", input.len(), total(sent)))
                    .or_else(|| wrong("the output", output.len(), total(received)))
            }
            _ => None,
        }
    }
}

/// Does it, the way that was chosen. Algorithms that cannot do a kind are never chosen for it.
pub(crate) fn perform(lane: &mut Lane, work: Work, algo: Algo, dtype: Dtype) -> Result<()> {
    if lane.members.len() == 1 {
        work.alone();
        return Ok(());
    }
    let members = lane.members.len();
    let width = dtype.bytes();
    let fold = |op: Op| Fold { dtype, op, ranks: members };
    let parts = |bytes: usize| Cut { count: bytes / width, parts: members, width };
    let team = Team::whole(lane);
    match (work, algo) {
        (Work::AllReduce { bytes, op }, Algo::Direct) => direct::all_reduce(lane, bytes, &fold(op)),
        (Work::AllReduce { bytes, op }, Algo::Ring) => {
            ring::all_reduce(lane, &team, bytes, &fold(op))
        }
        (Work::AllReduce { bytes, op }, Algo::Tree) => {
            tree::all_reduce(lane, &team, bytes, &fold(op))
        }
        (Work::AllReduce { bytes, op }, Algo::Halving) => {
            halving::all_reduce(lane, &team, bytes, &fold(op))
        }
        (Work::AllReduce { bytes, op }, Algo::TwoLevel) => {
            two_level::all_reduce(lane, bytes, &fold(op))
        }

        (Work::Reduce { bytes, op, root }, Algo::Direct) => {
            direct::reduce(lane, bytes, &fold(op), root)
        }
        (Work::Reduce { bytes, op, root }, Algo::Ring) => {
            ring::reduce(lane, &team, bytes, &fold(op), root)
        }
        (Work::Reduce { bytes, op, root }, Algo::Tree) => {
            tree::reduce(lane, &team, bytes, &fold(op), root)
        }
        (Work::Reduce { bytes, op, root }, Algo::TwoLevel) => {
            two_level::reduce(lane, bytes, &fold(op), root)
        }

        (Work::ReduceScatter { input, output, op }, algo) => {
            let cut = parts(input.len());
            match algo {
                Algo::Direct => {
                    direct::reduce_scatter(lane, input, output, &cut.parts(), &fold(op))
                }
                Algo::Halving => {
                    let mut copy = Scratch::copy_of(input);
                    halving::reduce_scatter_in_place(lane, &team, &mut copy, &cut, &fold(op))?;
                    output.copy_from_slice(&copy[cut.bytes(team.me)]);
                    Ok(())
                }
                Algo::TwoLevel => {
                    two_level::reduce_scatter(lane, input, output, &cut.parts(), &fold(op))
                }
                _ => ring::reduce_scatter(lane, &team, input, output, &cut.parts(), &fold(op)),
            }
        }

        (Work::AllGather { input, output }, algo) => {
            let cut = parts(output.len());
            if algo == Algo::Direct {
                return direct::all_gather(lane, input, output, &cut.parts(), true);
            }
            output[cut.bytes(team.me)].copy_from_slice(input);
            match algo {
                Algo::Halving => halving::all_gather(lane, &team, output, &cut),
                Algo::TwoLevel => two_level::all_gather(lane, output, &cut.parts()),
                _ => ring::all_gather(lane, &team, output, &cut.parts()),
            }
        }

        (Work::Broadcast { bytes, root }, Algo::Direct) => direct::broadcast(lane, bytes, root),
        (Work::Broadcast { bytes, root }, Algo::Ring) => ring::broadcast(lane, &team, bytes, root),
        (Work::Broadcast { bytes, root }, Algo::TwoLevel) => {
            two_level::broadcast(lane, bytes, root)
        }
        (Work::Broadcast { bytes, root }, _) => tree::broadcast(lane, &team, bytes, root),

        (Work::Gather { input, output, root }, algo) => {
            let parts = parts(input.len() * members).parts();
            match algo {
                Algo::Direct => {
                    let at_root = team.me == root;
                    direct::all_gather(lane, input, output, &parts, at_root)
                }
                _ => flat::collect(lane, &team, input, output, &parts, root),
            }
        }
        (Work::Scatter { input, output, root }, algo) => {
            let parts = parts(output.len() * members).parts();
            match algo {
                Algo::Direct => direct::scatter(lane, input, &parts, output, root),
                _ => flat::deal(lane, &team, input, output, &parts, root),
            }
        }
        (Work::AllToAll { input, output }, algo) => {
            let ranges = parts(input.len()).parts();
            match algo {
                Algo::Direct => {
                    let theirs = vec![ranges[team.me].clone(); members];
                    let routes = Routes {
                        outgoing: &ranges,
                        incoming: &ranges,
                        theirs: &theirs,
                        longest: ranges[team.me].len(),
                    };
                    direct::all_to_all(lane, input, output, &routes)
                }
                _ => flat::all_to_all(lane, &team, input, &ranges, output, &ranges),
            }
        }
        (Work::AllToAllV { input, sent, output, received }, algo) => {
            let (outgoing, incoming) = (packed(&sent, width), packed(&received, width));
            match algo {
                Algo::Direct => {
                    all_to_all_v_directly(lane, input, &outgoing, output, &incoming, width)
                }
                _ => flat::all_to_all(lane, &team, input, &outgoing, output, &incoming),
            }
        }
        (Work::Barrier, Algo::Direct) => direct::barrier(lane),
        (Work::Barrier, Algo::TwoLevel) => two_level::barrier(lane),
        (Work::Barrier, _) => halving::barrier(lane, &team),
        (work, algo) => unreachable!("{} is never chosen for {:?}", algo.name(), work.kind()),
    }
}

/// The counts of all members must be known before anybody can tell where its data lies.
fn all_to_all_v_directly(
    lane: &mut Lane,
    input: &[u8],
    outgoing: &[Range<usize>],
    output: &mut [u8],
    incoming: &[Range<usize>],
    width: usize,
) -> Result<()> {
    let me = lane.me;
    let row: Vec<u64> = outgoing.iter().map(|r| (r.len() / width) as u64).collect();
    let rows = direct::exchange_words(lane, &row)?;
    for (peer, row) in rows.iter().enumerate() {
        let expected = (incoming[peer].len() / width) as u64;
        if row[me] != expected {
            let theirs = format!(
                "it, too, but sends {} elements to rank {} where {expected} are expected",
                row[me], lane.members[me]
            );
            return Err(lane.watch().disagreement(lane.members[peer], &theirs));
        }
    }
    let theirs: Vec<Range<usize>> = rows
        .iter()
        .map(|row| {
            let counts: Vec<usize> = row.iter().map(|n| *n as usize).collect();
            packed(&counts, width)[me].clone()
        })
        .collect();
    let longest = rows.iter().flatten().max().map_or(0, |n| *n as usize * width);
    let routes = Routes { outgoing, incoming, theirs: &theirs, longest };
    direct::all_to_all(lane, input, output, &routes)
}

/// Ranges of these many elements side by side.
fn packed(counts: &[usize], width: usize) -> Vec<Range<usize>> {
    let mut at = 0;
    let range = |count: &usize| {
        let start = at;
        at += count * width;
        start..at
    };
    counts.iter().map(range).collect()
}
