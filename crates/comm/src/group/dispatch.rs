//! Runs a collective on a lane with the chosen algorithm. The one place that matches on collectives and
//! algorithms.

use crate::algo::direct::Routes;
use crate::algo::{Team, direct, flat, halving, ring, tree, two_level};
use crate::call::Algo;
use crate::call::error::Result;
use crate::call::fold::{Fold, Op};
use crate::call::partition::{Partition, packed};
use crate::group::args::CollectiveArgs;
use crate::lane::Lane;
use crate::memory::scratch::Scratch;
use lockstep_types::Dtype;
use std::ops::Range;

/// Performs a collective on a lane. `algo` must be one of the candidates for its kind.
pub(crate) fn dispatch(
    lane: &mut Lane,
    args: CollectiveArgs,
    algo: Algo,
    dtype: Dtype,
) -> Result<()> {
    if lane.members.len() == 1 {
        args.run_alone();
        return Ok(());
    }
    let members = lane.members.len();
    let width = dtype.bytes();
    let fold = |op: Op| Fold { dtype, op, ranks: members };
    let partition = |bytes: usize| Partition::of_bytes(bytes, members, width);
    let me = lane.me;
    match (args, algo) {
        (CollectiveArgs::AllReduce { bytes, op }, Algo::Direct) => {
            direct::all_reduce(lane, bytes, &fold(op))
        }
        (CollectiveArgs::AllReduce { bytes, op }, Algo::Ring) => {
            ring::all_reduce(&mut Team::whole(lane), bytes, &fold(op))
        }
        (CollectiveArgs::AllReduce { bytes, op }, Algo::Tree) => {
            tree::all_reduce(&mut Team::whole(lane), bytes, &fold(op))
        }
        (CollectiveArgs::AllReduce { bytes, op }, Algo::Halving) => {
            halving::all_reduce(&mut Team::whole(lane), bytes, &fold(op))
        }
        (CollectiveArgs::AllReduce { bytes, op }, Algo::TwoLevel) => {
            two_level::all_reduce(lane, bytes, &fold(op))
        }

        (CollectiveArgs::Reduce { bytes, op, root }, Algo::Direct) => {
            direct::reduce(lane, bytes, &fold(op), root)
        }
        (CollectiveArgs::Reduce { bytes, op, root }, Algo::Ring) => {
            ring::reduce(&mut Team::whole(lane), bytes, &fold(op), root)
        }
        (CollectiveArgs::Reduce { bytes, op, root }, Algo::Tree) => {
            tree::reduce(&mut Team::whole(lane), bytes, &fold(op), root)
        }
        (CollectiveArgs::Reduce { bytes, op, root }, Algo::TwoLevel) => {
            two_level::reduce(lane, bytes, &fold(op), root)
        }

        (CollectiveArgs::ReduceScatter { input, output, op }, algo) => {
            let partition = partition(input.len());
            match algo {
                Algo::Direct => {
                    direct::reduce_scatter(lane, input, output, &partition.parts(), &fold(op))
                }
                Algo::Halving => {
                    let mut copy = Scratch::copy_of(input);
                    halving::reduce_scatter_in_place(
                        &mut Team::whole(lane),
                        &mut copy,
                        &partition,
                        &fold(op),
                    )?;
                    output.copy_from_slice(&copy[partition.bytes(me)]);
                    Ok(())
                }
                Algo::TwoLevel => {
                    two_level::reduce_scatter(lane, input, output, &partition.parts(), &fold(op))
                }
                _ => ring::reduce_scatter(
                    &mut Team::whole(lane),
                    input,
                    output,
                    &partition.parts(),
                    &fold(op),
                ),
            }
        }

        (CollectiveArgs::AllGather { input, output }, algo) => {
            let partition = partition(output.len());
            if algo == Algo::Direct {
                return direct::all_gather(lane, input, output, &partition.parts(), true);
            }
            output[partition.bytes(me)].copy_from_slice(input);
            match algo {
                Algo::Halving => halving::all_gather(&mut Team::whole(lane), output, &partition),
                Algo::TwoLevel => two_level::all_gather(lane, output, &partition.parts()),
                _ => ring::all_gather(&mut Team::whole(lane), output, &partition.parts()),
            }
        }

        (CollectiveArgs::Broadcast { bytes, root }, Algo::Direct) => {
            direct::broadcast(lane, bytes, root)
        }
        (CollectiveArgs::Broadcast { bytes, root }, Algo::Ring) => {
            ring::broadcast(&mut Team::whole(lane), bytes, root)
        }
        (CollectiveArgs::Broadcast { bytes, root }, Algo::TwoLevel) => {
            two_level::broadcast(lane, bytes, root)
        }
        (CollectiveArgs::Broadcast { bytes, root }, _) => {
            tree::broadcast(&mut Team::whole(lane), bytes, root)
        }

        (CollectiveArgs::Gather { input, output, root }, algo) => {
            let parts = partition(input.len() * members).parts();
            match algo {
                Algo::Direct => {
                    let at_root = me == root;
                    direct::all_gather(lane, input, output, &parts, at_root)
                }
                _ => flat::gather(&mut Team::whole(lane), input, output, &parts, root),
            }
        }
        (CollectiveArgs::Scatter { input, output, root }, algo) => {
            let parts = partition(output.len() * members).parts();
            match algo {
                Algo::Direct => direct::scatter(lane, input, &parts, output, root),
                _ => flat::scatter(&mut Team::whole(lane), input, output, &parts, root),
            }
        }
        (CollectiveArgs::AllToAll { input, output }, algo) => {
            let ranges = partition(input.len()).parts();
            match algo {
                Algo::Direct => {
                    let theirs = vec![ranges[me].clone(); members];
                    let routes = Routes {
                        outgoing: &ranges,
                        incoming: &ranges,
                        theirs: &theirs,
                        longest: ranges[me].len(),
                    };
                    direct::all_to_all(lane, input, output, &routes)
                }
                _ => flat::all_to_all(&mut Team::whole(lane), input, &ranges, output, &ranges),
            }
        }
        (CollectiveArgs::AllToAllV { input, sent, output, received }, algo) => {
            let (outgoing, incoming) = (packed(&sent, width), packed(&received, width));
            match algo {
                Algo::Direct => {
                    let routes = exchange_counts(lane, &outgoing, &incoming, width)?;
                    let routes = Routes {
                        outgoing: &outgoing,
                        incoming: &incoming,
                        theirs: &routes.theirs,
                        longest: routes.longest,
                    };
                    direct::all_to_all(lane, input, output, &routes)
                }
                _ => flat::all_to_all(&mut Team::whole(lane), input, &outgoing, output, &incoming),
            }
        }
        (CollectiveArgs::Barrier, Algo::Direct) => direct::barrier(lane),
        (CollectiveArgs::Barrier, Algo::TwoLevel) => two_level::barrier(lane),
        (CollectiveArgs::Barrier, _) => halving::barrier(&mut Team::whole(lane)),
        (args, algo) => unreachable!("{} is never chosen for {:?}", algo.name(), args.kind()),
    }
}

/// Pieces that the members of an `all_to_all_v` have for us.
struct RemotePieces {
    /// Our piece in the input of each member.
    theirs: Vec<Range<usize>>,
    /// Length of the longest piece of all members.
    longest: usize,
}

/// Exchanges the counts of an `all_to_all_v`, which determine where each member's data is, and checks
/// that every member sends as much as we expect.
fn exchange_counts(
    lane: &mut Lane,
    outgoing: &[Range<usize>],
    incoming: &[Range<usize>],
    width: usize,
) -> Result<RemotePieces> {
    let me = lane.me;
    let row: Vec<u64> = outgoing.iter().map(|r| (r.len() / width) as u64).collect();
    let rows = direct::exchange_words(lane, &row)?;
    for (peer, row) in rows.iter().enumerate() {
        let expected = (incoming[peer].len() / width) as u64;
        if row[me] != expected {
            let theirs = format!(
                "the same, but sends {} elements to rank {}, which expects {expected}",
                row[me], lane.members[me]
            );
            return Err(lane.watch().disagreement(lane.members[peer], &theirs));
        }
    }
    let our_piece = |row: &Vec<u64>| {
        let counts: Vec<usize> = row.iter().map(|n| *n as usize).collect();
        packed(&counts, width)[me].clone()
    };
    let theirs = rows.iter().map(our_piece).collect();
    let longest = rows.iter().flatten().max().map_or(0, |n| *n as usize * width);
    Ok(RemotePieces { theirs, longest })
}
