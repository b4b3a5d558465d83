//! Descriptions of the data that a direct collective moves, thresholds between the access methods, and
//! counting of traffic.

use crate::call::fold::Fold;
use crate::call::partition::Partition;
use crate::lane::Lane;
use std::ops::Range;

/// Up to this size, an all-reduce is one round in which all members read all inputs.
pub(super) const ONE_ROUND: usize = 16 << 10;
/// From this many bytes per member on, a system call costs less than a second copy.
pub(super) const CROSS_MEMORY_MIN: usize = 16 << 10;
/// Up to this many members, pulling slices from each costs less than passing them through slots.
pub(super) const CROSS_MEMORY_MEMBERS: usize = 3;

/// A reduction in which each member combines its slice of all buffers.
pub(super) struct SliceReduction<'a> {
    /// Our buffer.
    pub data: *mut u8,
    pub partition: Partition,
    pub fold: &'a Fold,
    /// The only member that receives the result; all of them if `None`.
    pub root: Option<usize>,
}

impl SliceReduction<'_> {
    pub fn receives(&self, member: usize) -> bool {
        self.root.is_none_or(|root| root == member)
    }
}

/// Locations of the pieces of an all-to-all.
pub(crate) struct Routes<'a> {
    /// Pieces of our input, by receiver.
    pub outgoing: &'a [Range<usize>],
    /// Pieces of our output, by sender.
    pub incoming: &'a [Range<usize>],
    /// Our piece in the input of each member.
    pub theirs: &'a [Range<usize>],
    /// Length of the longest piece of all members.
    pub longest: usize,
}

/// Whether pulling slices of this length from every peer is cheaper than passing them through slots.
pub(super) fn slices_pay(members: usize, longest: usize) -> bool {
    longest >= CROSS_MEMORY_MIN && members <= CROSS_MEMORY_MEMBERS
}

/// Counts bytes written to our slots and copied from or to peers' processes, see `cost`.
pub(super) fn count(lane: &mut Lane, rounds: usize, bytes: usize) {
    if lane.slots.members() > 1 {
        lane.traffic.messages += rounds as u64;
        lane.traffic.bytes += bytes as u64;
    }
}
