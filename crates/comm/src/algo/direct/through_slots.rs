//! Direct collectives through the slots of the arena: each member copies its data for others into its
//! slots in rounds, and the others read it there. Needs nothing but memory that all members have mapped.

use super::pieces::{Routes, SliceReduction, count};
use crate::call::error::Result;
use crate::call::fold::Fold;
use crate::call::partition::longest;
use crate::lane::Lane;
use crate::memory::copy::copy;
use crate::memory::member::{Bank, SLOT_BYTES};
use std::ops::Range;

/// All members publish their whole buffer in one round and combine all of them.
pub(super) fn all_reduce_in_one_round(
    lane: &mut Lane,
    bytes: &mut [u8],
    fold: &Fold,
) -> Result<()> {
    let location = lane.locate(std::ptr::null(), 0);
    let (slots, watch) = lane.slots();
    slots.announce(watch, location);
    let round = slots.begin(Bank::Inputs, watch)?;
    let slot = slots.own_slot(Bank::Inputs, round);
    // SAFETY: our own slot, free since `begin`, and longer than a small buffer.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot, bytes.len()) };
    slots.fill(Bank::Inputs, round);
    let mut sources: Vec<*const u8> = vec![slot; slots.members()];
    for peer in slots.peers() {
        sources[peer] = slots.peer_slot(peer, Bank::Inputs, round, watch)?;
    }
    slots.compare(watch)?;
    // SAFETY: the slots are filled and not drained; `bytes` is ours.
    unsafe { fold.combine(&sources, &[bytes.as_mut_ptr()], bytes.len(), true) };
    slots.drain(Bank::Inputs, round);
    count(lane, 1, bytes.len());
    Ok(())
}

/// Passes slices of the inputs to their owners, and the owners' results to all receivers.
pub(super) fn reduce_slices(lane: &mut Lane, reduction: &SliceReduction) -> Result<()> {
    let (me, members, data) = (lane.slots.me, lane.slots.members(), reduction.data);
    let receives = reduction.receives(me);
    let total = reduction.partition.count * reduction.partition.width;
    let slices = reduction.partition.parts();
    let layout = RoundLayout::new(longest(&slices), members);
    let mut moved = 0;
    let mut inputs = Vec::new();
    let mut results = Vec::new();
    for turn in 0..layout.rounds + 2 {
        // Three rounds overlap: the inputs of this turn, the sums of the previous one, and the results
        // of the one before that.
        let (slots, watch) = lane.slots();
        if turn < layout.rounds {
            let round = slots.begin(Bank::Inputs, watch)?;
            let slot = slots.own_slot(Bank::Inputs, round);
            for peer in slots.peers() {
                let range = layout.piece(&slices[peer], turn);
                // SAFETY: our own buffer to the peer's place in our own slot.
                unsafe {
                    let place = slot.add(peer * layout.stride);
                    std::ptr::copy_nonoverlapping(data.add(range.start), place, range.len());
                }
                moved += range.len();
            }
            slots.fill(Bank::Inputs, round);
            inputs.push(round);
        }
        if turn >= 1 && turn - 1 < layout.rounds {
            let round = inputs[turn - 1];
            let range = layout.piece(&slices[me], turn - 1);
            let own = data.wrapping_add(range.start);
            let mut sources = vec![own.cast_const(); members];
            for peer in slots.peers() {
                let slot = slots.peer_slot(peer, Bank::Inputs, round, watch)?;
                sources[peer] = slot.wrapping_add(me * layout.stride);
            }
            let result = slots.begin(Bank::Results, watch)?;
            let destinations = [slots.own_slot(Bank::Results, result), own];
            let destinations = &destinations[..if receives { 2 } else { 1 }];
            // SAFETY: filled slots and our own buffer, to our own slot and buffer.
            unsafe { reduction.fold.combine(&sources, destinations, range.len(), true) };
            slots.drain(Bank::Inputs, round);
            slots.fill(Bank::Results, result);
            moved += range.len();
            results.push(result);
        }
        if turn >= 2 {
            let round = results[turn - 2];
            for peer in slots.peers().filter(|_| receives) {
                let range = layout.piece(&slices[peer], turn - 2);
                let slot = slots.peer_slot(peer, Bank::Results, round, watch)?;
                // SAFETY: a filled slot to our own buffer.
                unsafe { copy(slot, data.add(range.start), range.len(), total) };
            }
            slots.drain(Bank::Results, round);
        }
    }
    count(lane, 2 * layout.rounds, moved);
    Ok(())
}

pub(super) fn reduce_scatter(
    lane: &mut Lane,
    input: &[u8],
    output: &mut [u8],
    slices: &[Range<usize>],
    fold: &Fold,
) -> Result<()> {
    let me = lane.slots.me;
    let layout = RoundLayout::new(longest(slices), lane.slots.members());
    let own = 0..slices[me].len();
    personalized_rounds(lane, input, slices, &layout, |round, slots| {
        let range = layout.piece(&own, round);
        let mut sources: Vec<*const u8> = slots.to_vec();
        sources[me] = input[slices[me].start + range.start..].as_ptr();
        let to = output[range.clone()].as_mut_ptr();
        // SAFETY: filled slots and our own input, to our own output.
        unsafe { fold.combine(&sources, &[to], range.len(), true) };
    })
}

pub(super) fn all_to_all(
    lane: &mut Lane,
    input: &[u8],
    output: &mut [u8],
    routes: &Routes,
) -> Result<()> {
    let layout = RoundLayout::new(routes.longest, lane.slots.members());
    let me = lane.slots.me;
    let total = output.len();
    personalized_rounds(lane, input, routes.outgoing, &layout, |round, slots| {
        for (peer, slot) in slots.iter().enumerate().filter(|(p, _)| *p != me) {
            let to = &mut output[layout.piece(&routes.incoming[peer], round)];
            // SAFETY: a filled slot to our own output.
            unsafe { copy(*slot, to.as_mut_ptr(), to.len(), total) };
        }
    })
}

pub(super) fn scatter(
    lane: &mut Lane,
    input: &[u8],
    ranges: &[Range<usize>],
    output: &mut [u8],
    root: usize,
) -> Result<()> {
    let me = lane.slots.me;
    let layout = RoundLayout::new(longest(ranges), lane.slots.members());
    let nothing = vec![0..0; ranges.len()];
    let outgoing = if me == root { ranges } else { &nothing };
    let own = 0..output.len();
    personalized_rounds(lane, input, outgoing, &layout, |round, slots| {
        if me != root {
            let to = &mut output[layout.piece(&own, round)];
            // SAFETY: a filled slot to our own output.
            unsafe { copy(slots[root], to.as_mut_ptr(), to.len(), own.len()) };
        }
    })
}

pub(super) fn all_gather(
    lane: &mut Lane,
    input: &[u8],
    output: &mut [u8],
    places: &[Range<usize>],
    receives: bool,
) -> Result<()> {
    let total = output.len();
    shared_rounds(lane, input, places, |peer, range, slot| {
        if receives {
            let start = places[peer].start;
            let to = &mut output[start + range.start..start + range.end];
            // SAFETY: a filled slot to our own output.
            unsafe { copy(slot, to.as_mut_ptr(), to.len(), total) };
        }
    })
}

pub(super) fn broadcast(lane: &mut Lane, bytes: &mut [u8], root: usize) -> Result<()> {
    let at_root = lane.slots.me == root;
    let total = bytes.len();
    let mut lengths = vec![0..0; lane.slots.members()];
    lengths[root] = 0..total;
    if at_root {
        return shared_rounds(lane, bytes, &lengths, |_, _, _| {});
    }
    shared_rounds(lane, &[], &lengths, |_, range, slot| {
        let to = &mut bytes[range];
        // SAFETY: a filled slot to our own buffer.
        unsafe { copy(slot, to.as_mut_ptr(), to.len(), total) };
    })
}

/// Division of a slot into one place per peer, and the number of rounds that the longest range needs.
pub(super) struct RoundLayout {
    pub rounds: usize,
    /// Distance between the places of two peers: the maximum number of bytes per peer and round.
    stride: usize,
}

impl RoundLayout {
    pub fn new(longest: usize, members: usize) -> RoundLayout {
        let stride = piece_bytes(longest, SLOT_BYTES / members / 64 * 64);
        RoundLayout { rounds: longest.div_ceil(stride), stride }
    }

    fn piece(&self, range: &Range<usize>, round: usize) -> Range<usize> {
        let start = (range.start + round * self.stride).min(range.end);
        start..(start + self.stride).min(range.end)
    }
}

/// Bytes per round: small enough that filling and draining overlap, large enough that the bytes cost
/// more than the synchronization.
fn piece_bytes(longest: usize, most: usize) -> usize {
    (longest / 4).next_multiple_of(64).clamp(most.min(16 << 10), most)
}

/// Passes a different range of `input` to each peer, in rounds; `consume` gets the addresses of our
/// pieces in all peers' slots.
fn personalized_rounds(
    lane: &mut Lane,
    input: &[u8],
    ranges: &[Range<usize>],
    layout: &RoundLayout,
    mut consume: impl FnMut(usize, &[*const u8]),
) -> Result<()> {
    let mut moved = 0;
    let mut rounds = Vec::new();
    let members = lane.slots.members();
    for turn in 0..=layout.rounds {
        let (slots, watch) = lane.slots();
        if turn < layout.rounds {
            let round = slots.begin(Bank::Inputs, watch)?;
            let slot = slots.own_slot(Bank::Inputs, round);
            for peer in slots.peers() {
                let from = &input[layout.piece(&ranges[peer], turn)];
                // SAFETY: our own buffer to the peer's place in our own slot.
                unsafe {
                    let place = slot.add(peer * layout.stride);
                    std::ptr::copy_nonoverlapping(from.as_ptr(), place, from.len());
                }
                moved += from.len();
            }
            slots.fill(Bank::Inputs, round);
            rounds.push(round);
        }
        if turn >= 1 {
            let round = rounds[turn - 1];
            let mut places = vec![std::ptr::null(); members];
            for peer in slots.peers() {
                let slot = slots.peer_slot(peer, Bank::Inputs, round, watch)?;
                places[peer] = slot.wrapping_add(slots.me * layout.stride);
            }
            consume(turn - 1, &places);
            slots.drain(Bank::Inputs, round);
        }
    }
    count(lane, layout.rounds, moved);
    Ok(())
}

/// Rounds needed to pass on inputs of which this is the longest, and the bytes of each round.
pub(super) fn broadcast_rounds(longest: usize) -> (usize, usize) {
    let piece = piece_bytes(longest, SLOT_BYTES);
    (longest.div_ceil(piece), piece)
}

/// Passes our `input` to all peers, in rounds; `consume` gets each piece of each peer's input, whose
/// lengths are those of `lengths`.
fn shared_rounds(
    lane: &mut Lane,
    input: &[u8],
    lengths: &[Range<usize>],
    mut consume: impl FnMut(usize, Range<usize>, *const u8),
) -> Result<()> {
    let (turns, piece) = broadcast_rounds(longest(lengths));
    let part = |len: usize, turn: usize| (turn * piece).min(len)..((turn + 1) * piece).min(len);
    let mut rounds = Vec::new();
    for turn in 0..=turns {
        let (slots, watch) = lane.slots();
        if turn < turns {
            let round = slots.begin(Bank::Inputs, watch)?;
            let own = &input[part(input.len(), turn)];
            // SAFETY: to our own slot, which is at least a piece long.
            unsafe {
                let slot = slots.own_slot(Bank::Inputs, round);
                std::ptr::copy_nonoverlapping(own.as_ptr(), slot, own.len());
            }
            slots.fill(Bank::Inputs, round);
            rounds.push(round);
        }
        if turn >= 1 {
            let round = rounds[turn - 1];
            for peer in slots.peers() {
                let range = part(lengths[peer].len(), turn - 1);
                if !range.is_empty() {
                    consume(peer, range, slots.peer_slot(peer, Bank::Inputs, round, watch)?);
                }
            }
            slots.drain(Bank::Inputs, round);
        }
    }
    count(lane, turns, input.len());
    Ok(())
}
