//! Two levels: inside the hosts through their memory, between the hosts over the network, so that
//! the slow links carry as little as can be.
//!
//! With H hosts of L members each and S bytes, a member sends over the network
//! - all-reduce: 2(H-1)/H · S/L (a ring of the members with its seat, on its slice),
//! - reduce-scatter, all-gather: (H-1)/H · S/L,
//! - broadcast, reduce: S along one tree of one member per host.
//!
//! With unequal hosts an all-reduce goes through one member per host: 2(H-1)/H · S there.

use super::direct::sent;
use super::{Team, direct, halving, ring, tree};
use crate::call::cost::Traffic;
use crate::call::cut::Cut;
use crate::call::error::Result;
use crate::call::fold::{Fold, Op};
use crate::group::lane::{Lane, locals_of};
use crate::memory::scratch::Scratch;
use std::ops::Range;

/// Whether all hosts have the same number of members.
pub(crate) fn even(hosts: &[usize]) -> bool {
    let count = |host| hosts.iter().filter(|h| **h == host).count();
    hosts.iter().all(|h| count(*h) == count(hosts[0]))
}

fn host_count(hosts: &[usize]) -> usize {
    hosts.iter().max().map_or(0, |h| h + 1)
}

/// The members that have our seat on their host, one per host.
fn line(lane: &Lane) -> Team {
    Team { members: line_of(&lane.hosts, lane.stages.me), me: lane.hosts[lane.me] }
}

fn line_of(hosts: &[usize], seat: usize) -> Vec<usize> {
    (0..host_count(hosts)).map(|h| locals_of(hosts, h)[seat]).collect()
}

/// One member per host: the first, or on the root's host the root.
fn leaders(hosts: &[usize], root: usize) -> Vec<usize> {
    (0..host_count(hosts))
        .map(|h| if hosts[root] == h { root } else { locals_of(hosts, h)[0] })
        .collect()
}

/// A mean is divided once, at the end of the second level.
fn inner(fold: &Fold) -> Fold {
    Fold { op: if fold.op == Op::Mean { Op::Sum } else { fold.op }, ..*fold }
}

pub(crate) fn all_reduce(lane: &mut Lane, bytes: &mut [u8], fold: &Fold) -> Result<()> {
    if !even(&lane.hosts) {
        return all_reduce_through_leaders(lane, bytes, fold);
    }
    let width = fold.dtype.bytes();
    let cut = Cut { count: bytes.len() / width, parts: lane.locals.len(), width };
    let slices = cut.parts();
    let mut slice = Scratch::new(slices[lane.stages.me].len());
    direct::reduce_scatter(lane, bytes, &mut slice, &slices, &inner(fold))?;
    let line = line(lane);
    ring::all_reduce(lane, &line, &mut slice, fold)?;
    direct::all_gather(lane, &slice, bytes, &slices, true)
}

fn all_reduce_through_leaders(lane: &mut Lane, bytes: &mut [u8], fold: &Fold) -> Result<()> {
    direct::reduce(lane, bytes, &inner(fold), 0)?;
    if lane.stages.me == 0 {
        let members = leaders(&lane.hosts, locals_of(&lane.hosts, 0)[0]);
        let team = Team { members, me: lane.hosts[lane.me] };
        ring::all_reduce(lane, &team, bytes, fold)?;
    }
    direct::broadcast(lane, bytes, 0)
}

pub(crate) fn broadcast(lane: &mut Lane, bytes: &mut [u8], root: usize) -> Result<()> {
    let members = leaders(&lane.hosts, root);
    let leader = members[lane.hosts[lane.me]];
    if leader == lane.me {
        let team = Team { members, me: lane.hosts[lane.me] };
        let root_host = lane.hosts[root];
        tree::broadcast(lane, &team, bytes, root_host)?;
    }
    let seat = lane.locals.iter().position(|m| *m == leader).expect("our leader is on our host");
    direct::broadcast(lane, bytes, seat)
}

pub(crate) fn reduce(lane: &mut Lane, bytes: &mut [u8], fold: &Fold, root: usize) -> Result<()> {
    let members = leaders(&lane.hosts, root);
    let leader = members[lane.hosts[lane.me]];
    let seat = lane.locals.iter().position(|m| *m == leader).expect("our leader is on our host");
    if lane.me == root {
        direct::reduce(lane, bytes, &inner(fold), seat)?;
    } else {
        // The others' buffers stay as they are, a leader's too.
        let mut copy = Scratch::copy_of(bytes);
        direct::reduce(lane, &mut copy, &inner(fold), seat)?;
        if lane.me == leader {
            let team = Team { members, me: lane.hosts[lane.me] };
            let root_host = lane.hosts[root];
            return tree::reduce(lane, &team, &mut copy, fold, root_host);
        }
        return Ok(());
    }
    let team = Team { members, me: lane.hosts[lane.me] };
    let root_host = lane.hosts[root];
    tree::reduce(lane, &team, bytes, fold, root_host)
}

/// First along our line, then each host's parts inside the host.
pub(crate) fn all_gather(lane: &mut Lane, bytes: &mut [u8], parts: &[Range<usize>]) -> Result<()> {
    let line = line(lane);
    let line_parts: Vec<Range<usize>> = line.members.iter().map(|m| parts[*m].clone()).collect();
    ring::all_gather(lane, &line, bytes, &line_parts)?;
    for host in 0..host_count(&lane.hosts) {
        let places: Vec<Range<usize>> =
            locals_of(&lane.hosts, host).into_iter().map(|m| parts[m].clone()).collect();
        let own = Scratch::copy_of(&bytes[places[lane.stages.me].clone()]);
        direct::all_gather(lane, &own, bytes, &places, true)?;
    }
    Ok(())
}

/// First each host's parts inside the host, then along our line.
pub(crate) fn reduce_scatter(
    lane: &mut Lane,
    input: &[u8],
    output: &mut [u8],
    parts: &[Range<usize>],
    fold: &Fold,
) -> Result<()> {
    let line = line(lane);
    // The parts of our line's members, side by side.
    let mut packed: Vec<Range<usize>> = Vec::new();
    for m in &line.members {
        let start = packed.last().map_or(0, |r| r.end);
        packed.push(start..start + parts[*m].len());
    }
    let mut sums = Scratch::new(packed.last().map_or(0, |r| r.end));
    for host in 0..host_count(&lane.hosts) {
        let slices: Vec<Range<usize>> =
            locals_of(&lane.hosts, host).into_iter().map(|m| parts[m].clone()).collect();
        let into = &mut sums[packed[host].clone()];
        direct::reduce_scatter(lane, input, into, &slices, &inner(fold))?;
    }
    ring::reduce_scatter(lane, &line, &sums, output, &packed, fold)
}

pub(crate) fn barrier(lane: &mut Lane) -> Result<()> {
    direct::barrier(lane)?;
    if lane.stages.me == 0 {
        let members = leaders(&lane.hosts, locals_of(&lane.hosts, 0)[0]);
        let team = Team { members, me: lane.hosts[lane.me] };
        halving::barrier(lane, &team)?;
    }
    direct::barrier(lane)
}

/// Where a member is on its host, for the formulas.
struct Place {
    host: usize,
    /// How many members its host has.
    locals: usize,
    seat: usize,
}

fn place(hosts: &[usize], me: usize) -> Place {
    let locals = locals_of(hosts, hosts[me]);
    let seat = locals.iter().position(|m| *m == me).expect("everybody is on its own host");
    Place { host: hosts[me], locals: locals.len(), seat }
}

pub(crate) fn all_reduce_sent(cut: &Cut, hosts: &[usize], me: usize, pulls: bool) -> Traffic {
    let Place { host, locals, seat } = place(hosts, me);
    let slices = Cut { parts: locals, ..*cut }.parts();
    let between = |count: usize| ring::all_reduce_sent(count, cut.width, host_count(hosts), host);
    if even(hosts) {
        return sent::reduce_scatter(&slices, seat, pulls)
            + between(slices[seat].len() / cut.width)
            + sent::all_gather(&slices, seat, true, pulls);
    }
    let inside = sent::reduce(&slices, seat, 0, pulls)
        + sent::broadcast(cut.count * cut.width, locals, seat, 0, pulls);
    if seat == 0 { inside + between(cut.count) } else { inside }
}

pub(crate) fn broadcast_sent(
    bytes: usize,
    hosts: &[usize],
    me: usize,
    root: usize,
    pulls: bool,
) -> Traffic {
    let Place { host, locals, seat } = place(hosts, me);
    let leader = leaders(hosts, root)[host];
    let inside = sent::broadcast(bytes, locals, seat, place(hosts, leader).seat, pulls);
    if leader != me {
        return inside;
    }
    inside + tree::broadcast_sent(bytes, hosts[root], host, host_count(hosts))
}

pub(crate) fn reduce_sent(
    cut: &Cut,
    hosts: &[usize],
    me: usize,
    root: usize,
    pulls: bool,
) -> Traffic {
    let Place { host, locals, seat } = place(hosts, me);
    let leader = leaders(hosts, root)[host];
    let slices = Cut { parts: locals, ..*cut }.parts();
    let inside = sent::reduce(&slices, seat, place(hosts, leader).seat, pulls);
    if leader != me {
        return inside;
    }
    inside + tree::reduce_sent(cut.count * cut.width, hosts[root], host)
}

pub(crate) fn all_gather_sent(cut: &Cut, hosts: &[usize], me: usize, pulls: bool) -> Traffic {
    let (Place { host, seat, .. }, parts) = (place(hosts, me), cut.parts());
    let inside = per_host(&parts, hosts).map(|places| sent::all_gather(&places, seat, true, pulls));
    let line: Vec<_> = line_of(hosts, seat).into_iter().map(|m| parts[m].clone()).collect();
    inside.fold(ring::all_gather_sent(&line, host), |a, b| a + b)
}

pub(crate) fn reduce_scatter_sent(cut: &Cut, hosts: &[usize], me: usize, pulls: bool) -> Traffic {
    let (Place { host, seat, .. }, parts) = (place(hosts, me), cut.parts());
    let inside = per_host(&parts, hosts).map(|slices| sent::reduce_scatter(&slices, seat, pulls));
    let line: Vec<_> = line_of(hosts, seat).into_iter().map(|m| parts[m].clone()).collect();
    inside.fold(ring::reduce_scatter_sent(&line, host), |a, b| a + b)
}

pub(crate) fn barrier_sent(hosts: &[usize], me: usize) -> Traffic {
    let leads = place(hosts, me).seat == 0;
    if leads { halving::barrier_sent(host_count(hosts)) } else { Traffic::default() }
}

/// The parts of each host's members.
fn per_host(parts: &[Range<usize>], hosts: &[usize]) -> impl Iterator<Item = Vec<Range<usize>>> {
    (0..host_count(hosts))
        .map(|h| locals_of(hosts, h).into_iter().map(|m| parts[m].clone()).collect())
}
