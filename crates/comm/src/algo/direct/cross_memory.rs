//! Direct collectives on buffers of other processes: the kernel copies inputs from the peers' memory
//! and results back (process_vm_readv and process_vm_writev), in pieces that fit the caches.
//!
//! A cache line that another core has written is expensive to read. Pulling a slice and pushing the
//! result back touches each line of a peer's buffer once in each direction, from one core.

use super::pieces::{SliceReduction, count};
use crate::call::error::Result;
use crate::call::fold::Fold;
use crate::lane::Lane;
use crate::memory::cross_process::{RemoteAddress, pull, push};
use crate::memory::scratch::Scratch;
use std::ops::Range;

/// Bytes pulled at a time for combining, from all peers together: they stay in L2.
const PIECE: usize = 128 << 10;

/// Fills `to` from a peer's memory.
pub(super) fn pull_from(
    lane: &mut Lane,
    peer: usize,
    from: RemoteAddress,
    to: &mut [u8],
) -> Result<()> {
    // SAFETY: `to` is a live, exclusive slice.
    let done = unsafe { pull(from, to.as_mut_ptr(), to.len()) };
    count(lane, 1, to.len());
    done.map_err(|e| lane.watch().lost(lane.slots.ranks[peer], &e))
}

/// Copies `bytes` to a peer's memory.
fn push_to(lane: &mut Lane, peer: usize, to: RemoteAddress, bytes: &[u8]) -> Result<()> {
    // SAFETY: `bytes` is a live slice; the peer announced this memory for this call.
    let done = unsafe { push(to, bytes.as_ptr(), bytes.len()) };
    count(lane, 1, bytes.len());
    done.map_err(|e| lane.watch().lost(lane.slots.ranks[peer], &e))
}

/// Each owner pulls its slice from all members and pushes the result to all receivers.
pub(super) fn reduce_slices(
    lane: &mut Lane,
    remotes: &[RemoteAddress],
    reduction: &SliceReduction,
) -> Result<()> {
    let me = lane.slots.me;
    let own_slice = reduction.partition.bytes(me);
    let receivers: Vec<usize> = lane.slots.peers().filter(|p| reduction.receives(*p)).collect();
    let piece = piece_bytes(remotes.len());
    for turn in 0..own_slice.len().div_ceil(piece) {
        let range = nth_piece(&own_slice, turn, piece);
        let own = reduction.data.wrapping_add(range.start);
        let mut scratch = std::mem::take(&mut lane.scratch);
        let sources = pull_all(lane, remotes, &range, own, &mut scratch)?;
        // With two members, the result may overwrite the pulled data: one pass, no third buffer.
        let place = if remotes.len() == 2 { 1 - me } else { me } * piece;
        let destinations = [scratch.as_mut_ptr().wrapping_add(place), own];
        let destinations = &destinations[..if reduction.receives(me) { 2 } else { 1 }];
        // SAFETY: pulled copies and our own slice, to our scratch and our own slice, which nobody
        // else accesses.
        unsafe { reduction.fold.combine(&sources, destinations, range.len(), true) };
        let result = &scratch[place..place + range.len()];
        for peer in &receivers {
            push_to(lane, *peer, remotes[*peer].offset(range.start), result)?;
        }
        lane.scratch = scratch;
    }
    Ok(())
}

/// Each owner pulls its slice from all members. `remotes` are the addresses of that slice, `own` is our
/// contribution to it.
pub(super) fn reduce_scatter(
    lane: &mut Lane,
    remotes: &[RemoteAddress],
    own: &[u8],
    output: &mut [u8],
    fold: &Fold,
) -> Result<()> {
    let piece = piece_bytes(remotes.len());
    for turn in 0..own.len().div_ceil(piece) {
        let range = nth_piece(&(0..own.len()), turn, piece);
        let mut scratch = std::mem::take(&mut lane.scratch);
        let own = own[range.clone()].as_ptr();
        let sources = pull_all(lane, remotes, &range, own, &mut scratch)?;
        let to = output[range.clone()].as_mut_ptr();
        // SAFETY: pulled copies and our own input, to our own output.
        unsafe { fold.combine(&sources, &[to], range.len(), true) };
        lane.scratch = scratch;
    }
    Ok(())
}

/// Pulls `range` from every peer into `scratch`. Returns the sources in member order, with `own` as ours.
fn pull_all(
    lane: &mut Lane,
    remotes: &[RemoteAddress],
    range: &Range<usize>,
    own: *const u8,
    scratch: &mut Scratch,
) -> Result<Vec<*const u8>> {
    let piece = piece_bytes(remotes.len());
    scratch.reserve(piece * remotes.len());
    let mut sources = vec![own; remotes.len()];
    for peer in lane.slots.peers() {
        let place = &mut scratch[peer * piece..peer * piece + range.len()];
        pull_from(lane, peer, remotes[peer].offset(range.start), place)?;
        sources[peer] = place.as_ptr();
    }
    Ok(sources)
}

/// All receivers pull from the root. With a single receiver, the root would be idle, so it pushes the
/// second half.
pub(super) fn broadcast(
    lane: &mut Lane,
    remotes: &[RemoteAddress],
    bytes: &mut [u8],
    root: usize,
) -> Result<()> {
    let half = pulled_by_receiver(bytes.len(), remotes.len());
    if lane.slots.me != root {
        pull_from(lane, root, remotes[root], &mut bytes[..half])?;
    } else if remotes.len() == 2 {
        let peer = 1 - root;
        push_to(lane, peer, remotes[peer].offset(half), &bytes[half..])?;
    }
    Ok(())
}

/// Bytes of a broadcast that a receiver pulls; the root pushes the rest.
pub(super) fn pulled_by_receiver(bytes: usize, members: usize) -> usize {
    if members == 2 { bytes / 2 / 4096 * 4096 } else { bytes }
}

pub(super) fn piece_bytes(members: usize) -> usize {
    (PIECE / (members - 1).max(1)).max(16 << 10) / 64 * 64
}

fn nth_piece(range: &Range<usize>, turn: usize, piece: usize) -> Range<usize> {
    let start = (range.start + turn * piece).min(range.end);
    start..(start + piece).min(range.end)
}
