//! The direct collectives for buffers that lie in other processes: the kernel copies what a member
//! needs from its peers' memory, a piece that fits the caches at a time where it is to be combined.

use super::{RESULTS, close, count, reach};
use crate::copy::copy;
use crate::cut::Cut;
use crate::error::Result;
use crate::fold::Fold;
use crate::lane::Lane;
use crate::reach::{Remote, pull, push};
use crate::scratch::Scratch;
use crate::stage::SLOT_BYTES;
use std::ops::Range;

/// Bytes pulled at a time for combining, from all peers together: they stay in the second-level cache.
const PIECE: usize = 256 << 10;

/// Fills `to` from a peer's memory.
pub(super) fn take(lane: &mut Lane, peer: usize, from: Remote, to: &mut [u8]) -> Result<()> {
    // SAFETY: `to` is ours.
    let done = unsafe { pull(from, to.as_mut_ptr(), to.len()) };
    count(lane, 1, to.len());
    done.map_err(|e| lane.watch().lost(lane.stages.ranks[peer], &e))
}

/// Each owner pulls its slice from everybody, and passes the result on through its slots: to
/// everybody, or to the root alone, whose buffer is then the only one that changes.
pub(super) fn reduce_slices(
    lane: &mut Lane,
    remotes: &[Remote],
    data: *mut u8,
    cut: &Cut,
    fold: &Fold,
    root: Option<usize>,
) -> Result<()> {
    let (me, members) = (lane.stages.me, lane.stages.members());
    let total = cut.count * cut.width;
    let piece = piece_bytes(members).min(SLOT_BYTES);
    let turns = cut.largest().div_ceil(piece);
    let part = |seat: usize, turn: usize| part(&cut.bytes(seat), turn, piece);
    let receives = root.is_none_or(|root| root == me);
    let mut scratch = Scratch::new(piece * members);
    let mut rounds = Vec::with_capacity(turns);
    for turn in 0..=turns {
        if turn < turns {
            let range = part(me, turn);
            let own = data.wrapping_add(range.start);
            let sources = pull_all(lane, remotes, &range, own, &mut scratch)?;
            let (stages, watch) = lane.stages();
            let round = stages.begin(RESULTS, watch)?;
            let destinations = [stages.own_slot(RESULTS, round), own];
            let destinations = &destinations[..if receives { 2 } else { 1 }];
            // SAFETY: pulled copies and our own buffer, to our own slot and buffer. Nobody pulls our
            // own slice from us.
            unsafe { fold.combine(&sources, destinations, range.len(), true) };
            stages.fill(RESULTS, round);
            rounds.push(round);
            count(lane, 1, range.len());
        }
        if turn >= 1 {
            let (stages, watch) = lane.stages();
            let round = rounds[turn - 1];
            for peer in stages.peers() {
                // Waited for even where it is not wanted: it says that the peer has pulled this
                // piece from us.
                let slot = stages.slot_of(peer, RESULTS, round, watch)?;
                if receives {
                    let range = part(peer, turn - 1);
                    // SAFETY: a filled slot to our own buffer, which its owner has done pulling.
                    unsafe { copy(slot, data.add(range.start), range.len(), total) };
                }
            }
            stages.drain(RESULTS, round);
        }
    }
    Ok(())
}

/// Each owner pulls its slice from everybody.
pub(super) fn reduce_scatter(
    lane: &mut Lane,
    remotes: &[Remote],
    input: &[u8],
    output: &mut [u8],
    slices: &[Range<usize>],
    fold: &Fold,
) -> Result<()> {
    let (me, members) = (lane.stages.me, lane.stages.members());
    let piece = piece_bytes(members);
    let mut scratch = Scratch::new(piece * members);
    for turn in 0..slices[me].len().div_ceil(piece) {
        let range = part(&slices[me], turn, piece);
        let own = input[range.clone()].as_ptr();
        let sources = pull_all(lane, remotes, &range, own, &mut scratch)?;
        let at = range.start - slices[me].start;
        let to = output[at..at + range.len()].as_mut_ptr();
        // SAFETY: pulled copies and our own input, to our own output.
        unsafe { fold.combine(&sources, &[to], range.len(), true) };
    }
    close(lane)
}

/// The peers' bytes in `range`, and our own where they lie, in the order of the seats.
fn pull_all(
    lane: &mut Lane,
    remotes: &[Remote],
    range: &Range<usize>,
    own: *const u8,
    scratch: &mut Scratch,
) -> Result<Vec<*const u8>> {
    let piece = scratch.len() / remotes.len();
    let mut sources = vec![own; remotes.len()];
    for peer in lane.stages.peers() {
        let place = &mut scratch[peer * piece..peer * piece + range.len()];
        take(lane, peer, remotes[peer].offset(range.start), place)?;
        sources[peer] = place.as_ptr();
    }
    Ok(sources)
}

/// Everybody pulls from the root. With only one to pull, the root has nothing to do meanwhile: it
/// pushes the second half.
pub(super) fn broadcast(
    lane: &mut Lane,
    remotes: &[Remote],
    bytes: &mut [u8],
    root: usize,
) -> Result<()> {
    let me = lane.stages.me;
    let alone = lane.stages.members() == 2;
    let half = if alone { bytes.len() / 2 / 4096 * 4096 } else { bytes.len() };
    if me != root {
        let taken = take(lane, root, remotes[root], &mut bytes[..half]);
        if taken.is_err() {
            // The root may be writing the other half.
            lane.stages.await_hands_off();
        }
        taken?;
    } else if alone {
        let peer = 1 - root;
        let rest = &bytes[half..];
        reach(lane)?;
        // SAFETY: the peer leaves this half of its buffer to us until the meeting.
        let done = unsafe { push(remotes[peer].offset(half), rest.as_ptr(), rest.len()) };
        lane.stages.reach(false);
        count(lane, 1, rest.len());
        done.map_err(|e| lane.watch().lost(lane.stages.ranks[peer], &e))?;
    }
    close(lane)
}

fn piece_bytes(members: usize) -> usize {
    (PIECE / (members - 1).max(1)).max(32 << 10) / 64 * 64
}

fn part(range: &Range<usize>, turn: usize, piece: usize) -> Range<usize> {
    let start = (range.start + turn * piece).min(range.end);
    start..(start + piece).min(range.end)
}
