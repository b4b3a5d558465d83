//! Ring: every member sends to the next and receives from the previous, one part at a time. Sends the
//! minimum number of bytes, with one step per member: for large buffers on links of equal speed.
//!
//! With P members and S bytes, each member sends
//! - reduce-scatter, all-gather: (P-1)/P · S bytes in P-1 steps,
//! - all-reduce: 2(P-1)/P · S bytes in 2(P-1) steps, repeated for each block of a large buffer,
//! - broadcast: S bytes in pieces down the chain; the last member sends nothing,
//! - reduce: a reduce-scatter, after which every member sends its part to the root.

use super::Team;
use crate::call::error::Result;
use crate::call::fold::Fold;
use crate::call::partition::{Partition, longest, split_disjoint};
use crate::call::traffic::Traffic;
use crate::link::Inbox;
use crate::memory::scratch::Scratch;
use std::ops::Range;

/// Bytes of a block of an all-reduce.
pub(crate) const BLOCK: usize = 8 << 20;
/// Bytes of a broadcast that are sent down the chain as one message.
pub(crate) const PIECE: usize = 256 << 10;

pub(crate) fn all_reduce(team: &mut Team, bytes: &mut [u8], fold: &Fold) -> Result<()> {
    let width = fold.dtype.bytes();
    for block in blocks(bytes.len() / width, width) {
        let bytes = &mut bytes[block];
        let parts = Partition::of_bytes(bytes.len(), team.size(), width).parts();
        reduce_scatter_in_place(team, bytes, &parts, fold)?;
        all_gather(team, bytes, &parts)?;
    }
    Ok(())
}

/// Blocks of a large all-reduce, small enough that reduced data is still in the caches when it is
/// gathered.
fn blocks(count: usize, width: usize) -> impl Iterator<Item = Range<usize>> {
    let whole = Partition { count, parts: (count * width).div_ceil(BLOCK).max(1), width };
    (0..whole.parts).map(move |i| whole.bytes(i))
}

/// `parts` are the ranges that the members own, in team order. Afterwards our part of `bytes` holds the
/// result, and the other parts are undefined.
fn reduce_scatter_in_place(
    team: &mut Team,
    bytes: &mut [u8],
    parts: &[Range<usize>],
    fold: &Fold,
) -> Result<()> {
    let p = team.size();
    for s in 0..p - 1 {
        let (out_part, in_part) = parts_of_step(team.me, p, s);
        let (out, acc) = split_disjoint(bytes, parts[out_part].clone(), parts[in_part].clone());
        team.step_folding(Some((team.after(1), out)), team.before(1), acc, fold)?;
    }
    fold.finish(&mut bytes[parts[team.me].clone()]);
    Ok(())
}

/// Reduces into `output` without changing `input`.
pub(crate) fn reduce_scatter(
    team: &mut Team,
    input: &[u8],
    output: &mut [u8],
    parts: &[Range<usize>],
    fold: &Fold,
) -> Result<()> {
    let p = team.size();
    if p == 1 {
        output.copy_from_slice(input);
    }
    // Partial sums travel around the ring; each member adds its contribution and passes them on.
    let mut partial = Scratch::new(if p > 2 { longest(parts) } else { 0 });
    let mut next = Scratch::new(partial.len());
    for s in 0..p - 1 {
        let (out_part, in_part) = parts_of_step(team.me, p, s);
        let own = &input[parts[in_part].clone()];
        let out = if s == 0 {
            &input[parts[out_part].clone()]
        } else {
            &partial[..parts[out_part].len()]
        };
        let acc = if s + 2 == p { &mut *output } else { &mut next[..own.len()] };
        let len = own.len();
        let mut take = |at: usize, piece: &[u8]| {
            let sources = [piece.as_ptr(), own[at..].as_ptr()];
            let to = acc[at..at + piece.len()].as_mut_ptr();
            // SAFETY: three live buffers of at least this length, aligned because pieces and parts begin
            // at elements; only `acc` is written.
            unsafe { fold.combine(&sources, &[to], piece.len(), false) }
        };
        team.step(
            Some((team.after(1), out)),
            Some((team.before(1), Inbox::Each { len, take: &mut take })),
        )?;
        std::mem::swap(&mut partial, &mut next);
    }
    fold.finish(output);
    Ok(())
}

/// Receives every part of `bytes` from the member that owns it.
pub(crate) fn all_gather(team: &mut Team, bytes: &mut [u8], parts: &[Range<usize>]) -> Result<()> {
    let p = team.size();
    for s in 0..p - 1 {
        let (out_part, in_part) = ((team.me + p - s) % p, (team.me + p - s - 1) % p);
        let (out, into) = split_disjoint(bytes, parts[out_part].clone(), parts[in_part].clone());
        team.step(Some((team.after(1), out)), Some((team.before(1), Inbox::Into(into))))?;
    }
    Ok(())
}

/// Pipelined down the chain from the root: a member passes on one piece while it receives the next.
pub(crate) fn broadcast(team: &mut Team, bytes: &mut [u8], root: usize) -> Result<()> {
    let p = team.size();
    let place = (team.me + p - root) % p;
    let (first, last) = (place == 0, place == p - 1);
    let pieces = bytes.len().div_ceil(PIECE).max(1);
    let len = bytes.len();
    let ranges: Vec<_> = (0..pieces).map(|i| i * PIECE..((i + 1) * PIECE).min(len)).collect();
    for turn in 0..=pieces {
        let out = (turn > 0 && !last).then(|| ranges[turn - 1].clone());
        let inc = (turn < pieces && !first).then(|| ranges[turn].clone());
        let (out_bytes, in_bytes) =
            split_disjoint(bytes, out.clone().unwrap_or(0..0), inc.clone().unwrap_or(0..0));
        team.step(
            out.map(|_| (team.after(1), out_bytes)),
            inc.map(|_| (team.before(1), Inbox::Into(in_bytes))),
        )?;
    }
    Ok(())
}

/// Reduces into the root's buffer; the others are unchanged.
pub(crate) fn reduce(team: &mut Team, bytes: &mut [u8], fold: &Fold, root: usize) -> Result<()> {
    let width = fold.dtype.bytes();
    let parts = Partition::of_bytes(bytes.len(), team.size(), width).parts();
    let mut part = Scratch::new(parts[team.me].len());
    reduce_scatter(team, bytes, &mut part, &parts, fold)?;
    super::flat::gather(team, &part, bytes, &parts, root)
}

/// Parts sent and received in a step of a reduce-scatter. Our own part is received last.
fn parts_of_step(me: usize, p: usize, step: usize) -> (usize, usize) {
    ((me + 2 * p - step - 1) % p, (me + 2 * p - step - 2) % p)
}

pub(crate) fn all_reduce_sent(count: usize, width: usize, members: usize, me: usize) -> Traffic {
    let sent = blocks(count, width).map(|block| {
        let parts = Partition::of_bytes(block.len(), members, width).parts();
        reduce_scatter_sent(&parts, me) + all_gather_sent(&parts, me)
    });
    sent.sum()
}

pub(crate) fn reduce_scatter_sent(parts: &[Range<usize>], me: usize) -> Traffic {
    let p = parts.len();
    let bytes = (0..p - 1).map(|s| parts[parts_of_step(me, p, s).0].len() as u64).sum();
    Traffic { messages: p as u64 - 1, bytes }
}

/// All parts except the next member's.
pub(crate) fn all_gather_sent(parts: &[Range<usize>], me: usize) -> Traffic {
    let p = parts.len();
    let bytes = (0..p - 1).map(|s| parts[(me + p - s) % p].len() as u64).sum();
    Traffic { messages: p as u64 - 1, bytes }
}

pub(crate) fn broadcast_sent(size: usize, me: usize, root: usize, bytes: usize) -> Traffic {
    if (me + size - root) % size == size - 1 {
        return Traffic::default();
    }
    Traffic { messages: bytes.div_ceil(PIECE).max(1) as u64, bytes: bytes as u64 }
}
