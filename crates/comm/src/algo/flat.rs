//! Flat: every member straight to every other, or to the root. One step per peer and no byte twice:
//! for what differs from peer to peer.
//!
//! - all-to-all: P-1 steps and (P-1)/P · S bytes per member,
//! - gather, scatter: the root takes P-1 steps and (P-1) · S bytes, the others one step and S.

use super::Team;
use crate::call::cost::Traffic;
use crate::call::cut::Cut;
use crate::call::error::Result;
use crate::group::lane::Lane;
use crate::link::Inbox;
use std::ops::Range;

/// `outgoing[q]` of `input` goes to member q, and what member q sends comes to `incoming[q]` of
/// `output`. In step s everybody sends to the s-th after and receives from the s-th before.
pub(crate) fn all_to_all(
    lane: &mut Lane,
    team: &Team,
    input: &[u8],
    outgoing: &[Range<usize>],
    output: &mut [u8],
    incoming: &[Range<usize>],
) -> Result<()> {
    output[incoming[team.me].clone()].copy_from_slice(&input[outgoing[team.me].clone()]);
    for s in 1..team.size() {
        let (to, from) = ((team.me + s) % team.size(), (team.me + team.size() - s) % team.size());
        lane.step(
            Some((team.members[to], &input[outgoing[to].clone()])),
            Some((team.members[from], Inbox::Into(&mut output[incoming[from].clone()]))),
        )?;
    }
    Ok(())
}

/// Every member's part comes to the root, which puts it in its place in `bytes`.
pub(crate) fn collect(
    lane: &mut Lane,
    team: &Team,
    part: &[u8],
    bytes: &mut [u8],
    parts: &[Range<usize>],
    root: usize,
) -> Result<()> {
    if team.me != root {
        return lane.send(team.members[root], part);
    }
    bytes[parts[root].clone()].copy_from_slice(part);
    for s in 1..team.size() {
        let from = (root + s) % team.size();
        lane.receive(team.members[from], &mut bytes[parts[from].clone()])?;
    }
    Ok(())
}

/// Every member's part goes out from the root.
pub(crate) fn deal(
    lane: &mut Lane,
    team: &Team,
    bytes: &[u8],
    part: &mut [u8],
    parts: &[Range<usize>],
    root: usize,
) -> Result<()> {
    if team.me != root {
        return lane.receive(team.members[root], part);
    }
    part.copy_from_slice(&bytes[parts[root].clone()]);
    for s in 1..team.size() {
        let to = (root + s) % team.size();
        lane.send(team.members[to], &bytes[parts[to].clone()])?;
    }
    Ok(())
}

pub(crate) fn all_to_all_sent(cut: &Cut, me: usize) -> Traffic {
    let bytes = (0..cut.parts).filter(|q| *q != me).map(|q| cut.bytes(q).len() as u64).sum();
    Traffic { messages: cut.parts as u64 - 1, bytes }
}

pub(crate) fn collect_sent(cut: &Cut, me: usize, root: usize) -> Traffic {
    if me == root {
        return Traffic::default();
    }
    Traffic { messages: 1, bytes: cut.bytes(me).len() as u64 }
}

pub(crate) fn deal_sent(cut: &Cut, me: usize, root: usize) -> Traffic {
    if me == root { all_to_all_sent(cut, root) } else { Traffic::default() }
}
