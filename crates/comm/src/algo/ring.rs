//! Ring: every member sends to the next and receives from the one before, a part at a time.
//! The least bytes of all, at one step per member: for large buffers on links of equal speed.
//!
//! With P members and S bytes, each member takes
//! - reduce-scatter, all-gather: P-1 steps and (P-1)/P · S bytes,
//! - all-reduce: 2(P-1) steps and 2(P-1)/P · S bytes, once per block of a large buffer,
//! - broadcast: S bytes in pieces down the chain, and the last member sends none,
//! - reduce: a reduce-scatter, after which every member sends its part to the root.

use super::Team;
use crate::call::cost::Traffic;
use crate::call::cut::{Cut, apart};
use crate::call::error::Result;
use crate::call::fold::Fold;
use crate::group::lane::Lane;
use crate::link::Inbox;
use crate::memory::scratch::Scratch;
use std::ops::Range;

/// Bytes that an all-reduce takes at a time.
pub(crate) const BLOCK: usize = 8 << 20;
/// Piece of a broadcast that travels down the chain as one message.
pub(crate) const PIECE: usize = 256 << 10;

pub(crate) fn all_reduce(
    lane: &mut Lane,
    team: &Team,
    bytes: &mut [u8],
    fold: &Fold,
) -> Result<()> {
    let width = fold.dtype.bytes();
    for block in blocks(bytes.len() / width, width) {
        let bytes = &mut bytes[block];
        let parts = Cut { count: bytes.len() / width, parts: team.size(), width }.parts();
        reduce_scatter_in_place(lane, team, bytes, &parts, fold)?;
        all_gather(lane, team, bytes, &parts)?;
    }
    Ok(())
}

/// An all-reduce takes a large buffer block by block, so that what was reduced is still in the caches
/// when it is gathered.
fn blocks(count: usize, width: usize) -> impl Iterator<Item = Range<usize>> {
    let whole = Cut { count, parts: (count * width).div_ceil(BLOCK).max(1), width };
    (0..whole.parts).map(move |i| whole.bytes(i))
}

/// `parts` are the ranges that the members own, in team order. After this, our part of `bytes` is the finished one; the other parts are used up.
pub(crate) fn reduce_scatter_in_place(
    lane: &mut Lane,
    team: &Team,
    bytes: &mut [u8],
    parts: &[Range<usize>],
    fold: &Fold,
) -> Result<()> {
    let p = team.size();
    for s in 0..p - 1 {
        let (out_part, in_part) = parts_of_step(team.me, p, s);
        let (out, acc) = apart(bytes, parts[out_part].clone(), parts[in_part].clone());
        let len = acc.len();
        let mut take =
            |at: usize, piece: &[u8]| fold.fold_into(&mut acc[at..at + piece.len()], piece);
        lane.step(
            Some((team.after(1), out)),
            Some((team.before(1), Inbox::Each { len, take: &mut take })),
        )?;
    }
    fold.finish(&mut bytes[parts[team.me].clone()]);
    Ok(())
}

/// Leaves `input` as it is and puts our finished part into `output`.
pub(crate) fn reduce_scatter(
    lane: &mut Lane,
    team: &Team,
    input: &[u8],
    output: &mut [u8],
    parts: &[Range<usize>],
    fold: &Fold,
) -> Result<()> {
    let p = team.size();
    if p == 1 {
        output.copy_from_slice(input);
    }
    // What has been summed so far travels; our own contribution is added as it passes.
    let longest = parts.iter().map(|part| part.len()).max().unwrap_or(0);
    let mut passing = Scratch::new(if p > 2 { longest } else { 0 });
    let mut next = Scratch::new(passing.len());
    for s in 0..p - 1 {
        let (out_part, in_part) = parts_of_step(team.me, p, s);
        let own = &input[parts[in_part].clone()];
        let out = if s == 0 {
            &input[parts[out_part].clone()]
        } else {
            &passing[..parts[out_part].len()]
        };
        let acc = if s + 2 == p { &mut *output } else { &mut next[..own.len()] };
        let len = own.len();
        let mut take = |at: usize, piece: &[u8]| {
            let sources = [piece.as_ptr(), own[at..].as_ptr()];
            let to = acc[at..at + piece.len()].as_mut_ptr();
            // SAFETY: three live buffers of at least this length from these addresses on, aligned
            // because pieces and parts begin at elements; only `acc` is written.
            unsafe { fold.combine(&sources, &[to], piece.len(), false) }
        };
        lane.step(
            Some((team.after(1), out)),
            Some((team.before(1), Inbox::Each { len, take: &mut take })),
        )?;
        std::mem::swap(&mut passing, &mut next);
    }
    fold.finish(output);
    Ok(())
}

/// Every part of `bytes` comes from the member that owns it.
pub(crate) fn all_gather(
    lane: &mut Lane,
    team: &Team,
    bytes: &mut [u8],
    parts: &[Range<usize>],
) -> Result<()> {
    let p = team.size();
    for s in 0..p - 1 {
        let (out_part, in_part) = ((team.me + p - s) % p, (team.me + p - s - 1) % p);
        let (out, into) = apart(bytes, parts[out_part].clone(), parts[in_part].clone());
        lane.step(Some((team.after(1), out)), Some((team.before(1), Inbox::Into(into))))?;
    }
    Ok(())
}

/// Down the chain from the root, in pieces: a member passes on one piece while it receives the next.
pub(crate) fn broadcast(lane: &mut Lane, team: &Team, bytes: &mut [u8], root: usize) -> Result<()> {
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
            apart(bytes, out.clone().unwrap_or(0..0), inc.clone().unwrap_or(0..0));
        lane.step(
            out.map(|_| (team.after(1), out_bytes)),
            inc.map(|_| (team.before(1), Inbox::Into(in_bytes))),
        )?;
    }
    Ok(())
}

/// The root's buffer gets the result; the others' stay as they are.
pub(crate) fn reduce(
    lane: &mut Lane,
    team: &Team,
    bytes: &mut [u8],
    fold: &Fold,
    root: usize,
) -> Result<()> {
    let width = fold.dtype.bytes();
    let cut = Cut { count: bytes.len() / width, parts: team.size(), width };
    let parts = cut.parts();
    let mut part = Scratch::new(parts[team.me].len());
    reduce_scatter(lane, team, bytes, &mut part, &parts, fold)?;
    super::flat::collect(lane, team, &part, bytes, &parts, root)
}

/// What is sent and received in a step of a reduce-scatter: the part that ends with us comes last.
fn parts_of_step(me: usize, p: usize, step: usize) -> (usize, usize) {
    ((me + 2 * p - step - 1) % p, (me + 2 * p - step - 2) % p)
}

pub(crate) fn all_reduce_sent(count: usize, width: usize, members: usize, me: usize) -> Traffic {
    let sent = blocks(count, width).map(|block| {
        let parts = Cut { count: block.len() / width, parts: members, width }.parts();
        reduce_scatter_sent(&parts, me) + all_gather_sent(&parts, me)
    });
    sent.fold(Traffic::default(), |a, b| a + b)
}

pub(crate) fn reduce_scatter_sent(parts: &[Range<usize>], me: usize) -> Traffic {
    let p = parts.len();
    let bytes = (0..p - 1).map(|s| parts[parts_of_step(me, p, s).0].len() as u64).sum();
    Traffic { messages: p as u64 - 1, bytes }
}

/// All parts but the next member's.
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
