//! The direct collectives for buffers that lie in other processes: the kernel copies what a member
//! needs from its peers' memory, and results back, a piece that fits the caches at a time.
//!
//! A cache line that another core has written is the dear one. Pulling a slice and pushing the result
//! back touches each line of a peer's buffer once in each direction, from one core.

use super::count;
use crate::call::cut::Cut;
use crate::call::error::Result;
use crate::call::fold::Fold;
use crate::group::lane::Lane;
use crate::memory::reach::{Remote, pull, push};
use crate::memory::scratch::Scratch;
use std::ops::Range;

/// Bytes pulled at a time for combining, from all peers together: they stay in the second-level cache.
const PIECE: usize = 128 << 10;

/// Fills `to` from a peer's memory.
pub(super) fn take(lane: &mut Lane, peer: usize, from: Remote, to: &mut [u8]) -> Result<()> {
    // SAFETY: `to` is ours.
    let done = unsafe { pull(from, to.as_mut_ptr(), to.len()) };
    count(lane, 1, to.len());
    done.map_err(|e| lane.watch().lost(lane.stages.ranks[peer], &e))
}

/// Puts `bytes` into a peer's memory, which it has left to us until the next meeting.
fn give(lane: &mut Lane, peer: usize, to: Remote, bytes: &[u8]) -> Result<()> {
    // SAFETY: `bytes` is a live slice; the peer announced this memory for this call.
    let done = unsafe { push(to, bytes.as_ptr(), bytes.len()) };
    count(lane, 1, bytes.len());
    done.map_err(|e| lane.watch().lost(lane.stages.ranks[peer], &e))
}

/// Each owner pulls its slice from everybody, and pushes the result to everybody, or to the root
/// alone, whose buffer is then the only one that changes.
pub(super) fn reduce_slices(
    lane: &mut Lane,
    remotes: &[Remote],
    data: *mut u8,
    cut: &Cut,
    fold: &Fold,
    root: Option<usize>,
) -> Result<()> {
    let me = lane.stages.me;
    let receivers: Vec<usize> =
        lane.stages.peers().filter(|p| root.is_none_or(|r| r == *p)).collect();
    let keep = root.is_none_or(|root| root == me);
    let piece = piece_bytes(remotes.len());
    for turn in 0..cut.bytes(me).len().div_ceil(piece) {
        let range = part(&cut.bytes(me), turn, piece);
        let own = data.wrapping_add(range.start);
        let mut scratch = std::mem::take(&mut lane.scratch);
        let sources = pull_all(lane, remotes, &range, own, piece, &mut scratch)?;
        // With two of us, the result may take the place of what was pulled: one pass, no third buffer.
        let place = if remotes.len() == 2 { 1 - me } else { me } * piece;
        let destinations = [scratch.as_mut_ptr().wrapping_add(place), own];
        let destinations = &destinations[..if keep { 2 } else { 1 }];
        // SAFETY: pulled copies and our own slice, to our scratch and our own slice, which nobody
        // else touches.
        unsafe { fold.combine(&sources, destinations, range.len(), true) };
        let result = &scratch[place..place + range.len()];
        for peer in &receivers {
            give(lane, *peer, remotes[*peer].offset(range.start), result)?;
        }
        lane.scratch = scratch;
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
    let mine = &slices[lane.stages.me];
    let piece = piece_bytes(remotes.len());
    for turn in 0..mine.len().div_ceil(piece) {
        let range = part(mine, turn, piece);
        let own = input[range.clone()].as_ptr();
        let mut scratch = std::mem::take(&mut lane.scratch);
        let sources = pull_all(lane, remotes, &range, own, piece, &mut scratch)?;
        let to = output[range.start - mine.start..range.end - mine.start].as_mut_ptr();
        // SAFETY: pulled copies and our own input, to our own output.
        unsafe { fold.combine(&sources, &[to], range.len(), true) };
        lane.scratch = scratch;
    }
    Ok(())
}

/// The peers' bytes in `range`, and our own where they lie, in the order of the seats.
fn pull_all(
    lane: &mut Lane,
    remotes: &[Remote],
    range: &Range<usize>,
    own: *const u8,
    piece: usize,
    scratch: &mut Scratch,
) -> Result<Vec<*const u8>> {
    scratch.reserve(piece * remotes.len());
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
    let alone = remotes.len() == 2;
    let half = pulled_of_broadcast(bytes.len(), remotes.len());
    if lane.stages.me != root {
        take(lane, root, remotes[root], &mut bytes[..half])?;
    } else if alone {
        let peer = 1 - root;
        give(lane, peer, remotes[peer].offset(half), &bytes[half..])?;
    }
    Ok(())
}

/// How much of a broadcast is pulled; the root pushes the rest.
pub(super) fn pulled_of_broadcast(bytes: usize, members: usize) -> usize {
    if members == 2 { bytes / 2 / 4096 * 4096 } else { bytes }
}

pub(super) fn piece_bytes(members: usize) -> usize {
    (PIECE / (members - 1).max(1)).max(16 << 10) / 64 * 64
}

fn part(range: &Range<usize>, turn: usize, piece: usize) -> Range<usize> {
    let start = (range.start + turn * piece).min(range.end);
    start..(start + piece).min(range.end)
}
