//! What a member moves in a direct collective, exactly: the rounds that it fills and the bytes that it
//! puts into its slots and, where `pulls` says that members read each other's memory, the copies that
//! it makes out of (or into) a peer's. In place, and in meetings, nothing is counted.

use super::staged::{Deal, spread_turns};
use super::{ONE_ROUND, PULL_FROM, longest, pulled, slices_pay};
use crate::call::cost::Traffic;
use std::ops::Range;

fn moved(rounds: usize, bytes: usize) -> Traffic {
    Traffic { messages: rounds as u64, bytes: bytes as u64 }
}

fn sum(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(|r| r.len()).sum()
}

/// A small buffer goes whole.
pub(crate) fn all_reduce(slices: &[Range<usize>], me: usize, pulls: bool) -> Traffic {
    match sum(slices) {
        _ if slices.len() == 1 => Traffic::default(),
        bytes if bytes <= ONE_ROUND => moved(1, bytes),
        _ => reduce_to(slices, me, slices.len() - 1, pulls),
    }
}

pub(crate) fn reduce(slices: &[Range<usize>], me: usize, root: usize, pulls: bool) -> Traffic {
    reduce_to(slices, me, usize::from(me != root), pulls)
}

/// Staged: everything but our own slice, and that as a result. Pulled: our own slice of everybody's,
/// and as a result to each of the receivers.
fn reduce_to(slices: &[Range<usize>], me: usize, receivers: usize, pulls: bool) -> Traffic {
    let (members, longest, own) = (slices.len(), longest(slices), slices[me].len());
    if members == 1 {
        return Traffic::default();
    }
    if pulls && slices_pay(members, longest) {
        let copies = members - 1 + receivers;
        return moved(own.div_ceil(pulled::piece_bytes(members)) * copies, own * copies);
    }
    moved(2 * Deal::of(longest, members).rounds, sum(slices))
}

pub(crate) fn reduce_scatter(slices: &[Range<usize>], me: usize, pulls: bool) -> Traffic {
    let (members, longest, own) = (slices.len(), longest(slices), slices[me].len());
    if members == 1 {
        return Traffic::default();
    }
    if pulls && slices_pay(members, longest) {
        let turns = own.div_ceil(pulled::piece_bytes(members));
        return moved(turns * (members - 1), own * (members - 1));
    }
    moved(Deal::of(longest, members).rounds, sum(slices) - own)
}

/// Pieces of equal length.
pub(crate) fn all_to_all(slices: &[Range<usize>], me: usize, pulls: bool) -> Traffic {
    let staged = reduce_scatter(slices, me, false);
    if pulls && longest(slices) >= PULL_FROM {
        return Traffic { messages: slices.len() as u64 - 1, ..staged };
    }
    staged
}

/// Staged: the root's are the bytes, but everybody takes part in the rounds.
pub(crate) fn scatter(slices: &[Range<usize>], me: usize, root: usize, pulls: bool) -> Traffic {
    if pulls && longest(slices) >= PULL_FROM {
        return if me == root { Traffic::default() } else { moved(1, slices[me].len()) };
    }
    let at_root = reduce_scatter(slices, root, false);
    Traffic { bytes: if me == root { at_root.bytes } else { 0 }, ..at_root }
}

/// Staged: our own. Pulled: everybody else's, by those who want it.
pub(crate) fn all_gather(places: &[Range<usize>], me: usize, wanted: bool, pulls: bool) -> Traffic {
    let (members, longest, own) = (places.len(), longest(places), places[me].len());
    match pulls && longest >= PULL_FROM {
        _ if members == 1 => Traffic::default(),
        true if wanted => moved(members - 1, sum(places) - own),
        true => Traffic::default(),
        false => moved(spread_turns(longest).0, own),
    }
}

pub(crate) fn broadcast(
    bytes: usize,
    members: usize,
    me: usize,
    root: usize,
    pulls: bool,
) -> Traffic {
    let half = pulled::pulled_of_broadcast(bytes, members);
    match pulls && bytes >= PULL_FROM {
        _ if members == 1 => Traffic::default(),
        true if me != root => moved(1, half),
        true if members == 2 => moved(1, bytes - half),
        true => Traffic::default(),
        false => moved(spread_turns(bytes).0, if me == root { bytes } else { 0 }),
    }
}
