//! The direct collectives through the slots of the arena: what a member has for others is copied into
//! its slots in rounds, and read from there. Needs nothing but memory that is mapped by all.

use super::{INPUTS, RESULTS, Routes, count, longest};
use crate::call::cut::Cut;
use crate::call::error::Result;
use crate::call::fold::Fold;
use crate::group::lane::Lane;
use crate::memory::copy::copy;
use crate::memory::stage::SLOT_BYTES;
use std::ops::Range;

/// Everybody shows its whole buffer in one round, and combines everybody's.
pub(super) fn all_reduce_in_one_round(
    lane: &mut Lane,
    bytes: &mut [u8],
    fold: &Fold,
) -> Result<()> {
    let window = lane.window(std::ptr::null(), 0);
    let (stages, watch) = lane.stages();
    stages.announce(watch, window);
    let round = stages.begin(INPUTS, watch)?;
    let slot = stages.own_slot(INPUTS, round);
    // SAFETY: our own slot, free since `begin`, and longer than a small buffer.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot, bytes.len()) };
    stages.fill(INPUTS, round);
    let mut sources: Vec<*const u8> = vec![slot; stages.members()];
    for peer in stages.peers() {
        sources[peer] = stages.slot_of(peer, INPUTS, round, watch)?;
    }
    stages.compare(watch)?;
    // SAFETY: the slots are filled and not drained; `bytes` is ours.
    unsafe { fold.combine(&sources, &[bytes.as_mut_ptr()], bytes.len(), true) };
    stages.drain(INPUTS, round);
    count(lane, 1, bytes.len());
    Ok(())
}

/// Slices of the inputs go to their owners, and the owners' results to everybody, or to the root
/// alone, whose buffer is then the only one that changes.
pub(super) fn reduce_slices(
    lane: &mut Lane,
    data: *mut u8,
    cut: &Cut,
    fold: &Fold,
    root: Option<usize>,
) -> Result<()> {
    let (me, members) = (lane.stages.me, lane.stages.members());
    let receives = root.is_none_or(|root| root == me);
    let total = cut.count * cut.width;
    let slices = cut.parts();
    let deal = Deal::of(longest(&slices), members);
    let mut moved = 0;
    let mut inputs = Vec::new();
    let mut results = Vec::new();
    for turn in 0..deal.rounds + 2 {
        // Three things at a time: the inputs of this turn, the sums of the one before, and the
        // results of the one before that.
        let (stages, watch) = lane.stages();
        if turn < deal.rounds {
            let round = stages.begin(INPUTS, watch)?;
            let slot = stages.own_slot(INPUTS, round);
            for peer in stages.peers() {
                let range = deal.piece(&slices[peer], turn);
                // SAFETY: our own buffer to the peer's place in our own slot.
                unsafe {
                    let place = slot.add(peer * deal.stride);
                    std::ptr::copy_nonoverlapping(data.add(range.start), place, range.len());
                }
                moved += range.len();
            }
            stages.fill(INPUTS, round);
            inputs.push(round);
        }
        if turn >= 1 && turn - 1 < deal.rounds {
            let round = inputs[turn - 1];
            let range = deal.piece(&slices[me], turn - 1);
            let own = data.wrapping_add(range.start);
            let mut sources = vec![own.cast_const(); members];
            for peer in stages.peers() {
                let slot = stages.slot_of(peer, INPUTS, round, watch)?;
                sources[peer] = slot.wrapping_add(me * deal.stride);
            }
            let result = stages.begin(RESULTS, watch)?;
            let destinations = [stages.own_slot(RESULTS, result), own];
            let destinations = &destinations[..if receives { 2 } else { 1 }];
            // SAFETY: filled slots and our own buffer, to our own slot and buffer.
            unsafe { fold.combine(&sources, destinations, range.len(), true) };
            stages.drain(INPUTS, round);
            stages.fill(RESULTS, result);
            moved += range.len();
            results.push(result);
        }
        if turn >= 2 {
            let round = results[turn - 2];
            for peer in stages.peers().filter(|_| receives) {
                let range = deal.piece(&slices[peer], turn - 2);
                let slot = stages.slot_of(peer, RESULTS, round, watch)?;
                // SAFETY: a filled slot to our own buffer.
                unsafe { copy(slot, data.add(range.start), range.len(), total) };
            }
            stages.drain(RESULTS, round);
        }
    }
    count(lane, 2 * deal.rounds, moved);
    Ok(())
}

pub(super) fn reduce_scatter(
    lane: &mut Lane,
    input: &[u8],
    output: &mut [u8],
    slices: &[Range<usize>],
    fold: &Fold,
) -> Result<()> {
    let me = lane.stages.me;
    let deal = Deal::of(longest(slices), lane.stages.members());
    let mine = 0..slices[me].len();
    deal_rounds(lane, input, slices, &deal, |round, slots| {
        let range = deal.piece(&mine, round);
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
    let deal = Deal::of(routes.longest, lane.stages.members());
    let me = lane.stages.me;
    let total = output.len();
    deal_rounds(lane, input, routes.outgoing, &deal, |round, slots| {
        for (peer, slot) in slots.iter().enumerate().filter(|(p, _)| *p != me) {
            let to = &mut output[deal.piece(&routes.incoming[peer], round)];
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
    let me = lane.stages.me;
    let deal = Deal::of(longest(ranges), lane.stages.members());
    let nothing = vec![0..0; ranges.len()];
    let outgoing = if me == root { ranges } else { &nothing };
    let mine = 0..output.len();
    deal_rounds(lane, input, outgoing, &deal, |round, slots| {
        if me != root {
            let to = &mut output[deal.piece(&mine, round)];
            // SAFETY: a filled slot to our own output.
            unsafe { copy(slots[root], to.as_mut_ptr(), to.len(), mine.len()) };
        }
    })
}

pub(super) fn all_gather(
    lane: &mut Lane,
    input: &[u8],
    output: &mut [u8],
    places: &[Range<usize>],
    wanted: bool,
) -> Result<()> {
    let total = output.len();
    spread(lane, input, places, |peer, range, slot| {
        if wanted {
            let start = places[peer].start;
            let to = &mut output[start + range.start..start + range.end];
            // SAFETY: a filled slot to our own output.
            unsafe { copy(slot, to.as_mut_ptr(), to.len(), total) };
        }
    })
}

pub(super) fn broadcast(lane: &mut Lane, bytes: &mut [u8], root: usize) -> Result<()> {
    let at_root = lane.stages.me == root;
    let total = bytes.len();
    let mut lengths = vec![0..0; lane.stages.members()];
    lengths[root] = 0..total;
    if at_root {
        return spread(lane, bytes, &lengths, |_, _, _| {});
    }
    spread(lane, &[], &lengths, |_, range, slot| {
        let to = &mut bytes[range];
        // SAFETY: a filled slot to our own buffer.
        unsafe { copy(slot, to.as_mut_ptr(), to.len(), total) };
    })
}

/// How ranges of different lengths are dealt out in rounds: each peer has a place in the slot.
pub(super) struct Deal {
    pub rounds: usize,
    /// Bytes from one peer's place to the next, and the most a peer gets in one round.
    stride: usize,
}

impl Deal {
    pub fn of(longest: usize, members: usize) -> Deal {
        let stride = piece_bytes(longest, SLOT_BYTES / members / 64 * 64);
        Deal { rounds: longest.div_ceil(stride), stride }
    }

    fn piece(&self, range: &Range<usize>, round: usize) -> Range<usize> {
        let start = (range.start + round * self.stride).min(range.end);
        start..(start + self.stride).min(range.end)
    }
}

/// Bytes per round: enough rounds to overlap filling and draining, but none so small that the
/// meeting costs more than the bytes.
fn piece_bytes(longest: usize, most: usize) -> usize {
    (longest / 4).next_multiple_of(64).clamp(most.min(16 << 10), most)
}

/// Deals out `ranges` of `input` in rounds; `consume` gets everybody's slot at our place.
fn deal_rounds(
    lane: &mut Lane,
    input: &[u8],
    ranges: &[Range<usize>],
    deal: &Deal,
    mut consume: impl FnMut(usize, &[*const u8]),
) -> Result<()> {
    let mut moved = 0;
    let mut rounds = Vec::new();
    let members = lane.stages.members();
    for turn in 0..=deal.rounds {
        let (stages, watch) = lane.stages();
        if turn < deal.rounds {
            let round = stages.begin(INPUTS, watch)?;
            let slot = stages.own_slot(INPUTS, round);
            for peer in stages.peers() {
                let from = &input[deal.piece(&ranges[peer], turn)];
                // SAFETY: our own buffer to the peer's place in our own slot.
                unsafe {
                    let place = slot.add(peer * deal.stride);
                    std::ptr::copy_nonoverlapping(from.as_ptr(), place, from.len());
                }
                moved += from.len();
            }
            stages.fill(INPUTS, round);
            rounds.push(round);
        }
        if turn >= 1 {
            let round = rounds[turn - 1];
            let mut slots = vec![std::ptr::null(); members];
            for peer in stages.peers() {
                let slot = stages.slot_of(peer, INPUTS, round, watch)?;
                slots[peer] = slot.wrapping_add(stages.me * deal.stride);
            }
            consume(turn - 1, &slots);
            stages.drain(INPUTS, round);
        }
    }
    count(lane, deal.rounds, moved);
    Ok(())
}

/// How many rounds it takes to spread pieces of which this is the longest, and the bytes of each.
pub(super) fn spread_turns(longest: usize) -> (usize, usize) {
    let piece = piece_bytes(longest, SLOT_BYTES);
    (longest.div_ceil(piece), piece)
}

/// Passes our `input` on to everybody in rounds; `consume` gets each piece of each peer's, as long as
/// `lengths` says.
fn spread(
    lane: &mut Lane,
    input: &[u8],
    lengths: &[Range<usize>],
    mut consume: impl FnMut(usize, Range<usize>, *const u8),
) -> Result<()> {
    let (turns, piece) = spread_turns(longest(lengths));
    let part = |len: usize, turn: usize| (turn * piece).min(len)..((turn + 1) * piece).min(len);
    let mut rounds = Vec::new();
    for turn in 0..=turns {
        let (stages, watch) = lane.stages();
        if turn < turns {
            let round = stages.begin(INPUTS, watch)?;
            let own = &input[part(input.len(), turn)];
            // SAFETY: to our own slot, which is at least a piece long.
            unsafe {
                let slot = stages.own_slot(INPUTS, round);
                std::ptr::copy_nonoverlapping(own.as_ptr(), slot, own.len());
            }
            stages.fill(INPUTS, round);
            rounds.push(round);
        }
        if turn >= 1 {
            let round = rounds[turn - 1];
            for peer in stages.peers() {
                let range = part(lengths[peer].len(), turn - 1);
                if !range.is_empty() {
                    consume(peer, range, stages.slot_of(peer, INPUTS, round, watch)?);
                }
            }
            stages.drain(INPUTS, round);
        }
    }
    count(lane, turns, input.len());
    Ok(())
}
