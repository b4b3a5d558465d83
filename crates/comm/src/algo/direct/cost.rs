//! Exact traffic of a member in a direct collective: the rounds that it fills and the bytes that it
//! writes to its slots or, with cross-memory access, the copies that it makes from or to a peer's memory.
//! In-place accesses and barriers are not counted.

use super::cross_memory as copies;
use super::pieces::{CROSS_MEMORY_MIN, ONE_ROUND, slices_pay};
use super::through_slots::{RoundLayout, broadcast_rounds};
use crate::algo::choose::BufferAccess::{self, CrossMemory, InPlace};
use crate::call::partition::longest;
use crate::call::traffic::Traffic;
use std::ops::Range;

fn traffic(rounds: usize, bytes: usize) -> Traffic {
    Traffic { messages: rounds as u64, bytes: bytes as u64 }
}

fn sum(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(|r| r.len()).sum()
}

/// A small buffer is passed on whole.
pub(crate) fn all_reduce(slices: &[Range<usize>], me: usize, access: BufferAccess) -> Traffic {
    match sum(slices) {
        _ if slices.len() == 1 => Traffic::default(),
        bytes if bytes <= ONE_ROUND => traffic(1, bytes),
        _ => reduce_to(slices, me, slices.len() - 1, access),
    }
}

pub(crate) fn reduce(
    slices: &[Range<usize>],
    me: usize,
    root: usize,
    access: BufferAccess,
) -> Traffic {
    reduce_to(slices, me, usize::from(me != root), access)
}

/// Through slots: all inputs except our own slice, and the result of our slice. Cross-memory: our slice
/// from every peer, and its result to each of the receivers.
fn reduce_to(
    slices: &[Range<usize>],
    me: usize,
    receivers: usize,
    access: BufferAccess,
) -> Traffic {
    let (members, longest, own) = (slices.len(), longest(slices), slices[me].len());
    if members == 1 || access == InPlace {
        return Traffic::default();
    }
    if access == CrossMemory && slices_pay(members, longest) {
        let each = members - 1 + receivers;
        return traffic(own.div_ceil(copies::piece_bytes(members)) * each, own * each);
    }
    traffic(2 * RoundLayout::new(longest, members).rounds, sum(slices))
}

pub(crate) fn reduce_scatter(slices: &[Range<usize>], me: usize, access: BufferAccess) -> Traffic {
    let (members, longest, own) = (slices.len(), longest(slices), slices[me].len());
    if members == 1 || access == InPlace {
        return Traffic::default();
    }
    if access == CrossMemory && slices_pay(members, longest) {
        let pieces = own.div_ceil(copies::piece_bytes(members));
        return traffic(pieces * (members - 1), own * (members - 1));
    }
    traffic(RoundLayout::new(longest, members).rounds, sum(slices) - own)
}

/// For pieces of equal length.
pub(crate) fn all_to_all(slices: &[Range<usize>], me: usize, access: BufferAccess) -> Traffic {
    let through_slots = reduce_scatter(slices, me, access.without_cross_memory());
    if access == CrossMemory && longest(slices) >= CROSS_MEMORY_MIN {
        return Traffic { messages: slices.len() as u64 - 1, ..through_slots };
    }
    through_slots
}

/// Through slots, only the root writes bytes, but all members take part in the rounds.
pub(crate) fn scatter(
    slices: &[Range<usize>],
    me: usize,
    root: usize,
    access: BufferAccess,
) -> Traffic {
    if access == CrossMemory && longest(slices) >= CROSS_MEMORY_MIN {
        return if me == root { Traffic::default() } else { traffic(1, slices[me].len()) };
    }
    let at_root = reduce_scatter(slices, root, access.without_cross_memory());
    Traffic { bytes: if me == root { at_root.bytes } else { 0 }, ..at_root }
}

/// Through slots: our own part. Cross-memory: all other parts, on the members that receive.
pub(crate) fn all_gather(
    places: &[Range<usize>],
    me: usize,
    receives: bool,
    access: BufferAccess,
) -> Traffic {
    let (members, longest, own) = (places.len(), longest(places), places[me].len());
    match access == CrossMemory && longest >= CROSS_MEMORY_MIN {
        _ if members == 1 || access == InPlace => Traffic::default(),
        true if receives => traffic(members - 1, sum(places) - own),
        true => Traffic::default(),
        false => traffic(broadcast_rounds(longest).0, own),
    }
}

pub(crate) fn broadcast(
    bytes: usize,
    members: usize,
    me: usize,
    root: usize,
    access: BufferAccess,
) -> Traffic {
    let pulled = copies::pulled_by_receiver(bytes, members);
    match access == CrossMemory && bytes >= CROSS_MEMORY_MIN {
        _ if members == 1 || access == InPlace => Traffic::default(),
        true if me != root => traffic(1, pulled),
        true if members == 2 => traffic(1, bytes - pulled),
        true => Traffic::default(),
        false => traffic(broadcast_rounds(bytes).0, if me == root { bytes } else { 0 }),
    }
}
