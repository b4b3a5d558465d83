//! Flat: every member sends directly to every other, or to the root. One step per peer, and no byte is
//! sent twice. For collectives in which every pair of members exchanges different data.
//!
//! - all-to-all: P-1 steps; each member sends (P-1)/P · S bytes,
//! - gather, scatter: P-1 steps and (P-1) · S bytes at the root; one step and S bytes elsewhere.

use super::Team;
use crate::call::error::Result;
use crate::call::partition::Partition;
use crate::call::traffic::Traffic;
use crate::link::Inbox;
use std::ops::Range;

/// Sends `outgoing[q]` of `input` to member q and receives `incoming[q]` of `output` from it. In step s
/// every member sends to the s-th member after it and receives from the s-th before it.
pub(crate) fn all_to_all(
    team: &mut Team,
    input: &[u8],
    outgoing: &[Range<usize>],
    output: &mut [u8],
    incoming: &[Range<usize>],
) -> Result<()> {
    output[incoming[team.me].clone()].copy_from_slice(&input[outgoing[team.me].clone()]);
    for s in 1..team.size() {
        let (to, from) = (team.after(s), team.before(s));
        team.step(
            Some((to, &input[outgoing[to].clone()])),
            Some((from, Inbox::Into(&mut output[incoming[from].clone()]))),
        )?;
    }
    Ok(())
}

/// The root receives every member's part into its place in `bytes`.
pub(crate) fn gather(
    team: &mut Team,
    part: &[u8],
    bytes: &mut [u8],
    parts: &[Range<usize>],
    root: usize,
) -> Result<()> {
    if team.me != root {
        return team.send(root, part);
    }
    bytes[parts[root].clone()].copy_from_slice(part);
    for s in 1..team.size() {
        let from = (root + s) % team.size();
        team.receive(from, &mut bytes[parts[from].clone()])?;
    }
    Ok(())
}

/// The root sends every member its part.
pub(crate) fn scatter(
    team: &mut Team,
    bytes: &[u8],
    part: &mut [u8],
    parts: &[Range<usize>],
    root: usize,
) -> Result<()> {
    if team.me != root {
        return team.receive(root, part);
    }
    part.copy_from_slice(&bytes[parts[root].clone()]);
    for s in 1..team.size() {
        let to = (root + s) % team.size();
        team.send(to, &bytes[parts[to].clone()])?;
    }
    Ok(())
}

pub(crate) fn all_to_all_sent(partition: &Partition, me: usize) -> Traffic {
    let bytes =
        (0..partition.parts).filter(|q| *q != me).map(|q| partition.bytes(q).len() as u64).sum();
    Traffic { messages: partition.parts as u64 - 1, bytes }
}

pub(crate) fn gather_sent(partition: &Partition, me: usize, root: usize) -> Traffic {
    if me == root {
        return Traffic::default();
    }
    Traffic { messages: 1, bytes: partition.bytes(me).len() as u64 }
}

pub(crate) fn scatter_sent(partition: &Partition, me: usize, root: usize) -> Traffic {
    if me == root { all_to_all_sent(partition, root) } else { Traffic::default() }
}
