//! Two levels: within hosts through shared memory, between hosts over the network, so that the slow
//! links carry as little as possible.
//!
//! With H hosts of L members each and S bytes, a member sends over the network
//! - all-reduce: 2(H-1)/H · S/L (a ring over the members with the same local index, on their slice),
//! - reduce-scatter, all-gather: (H-1)/H · S/L,
//! - broadcast, reduce: S along one tree with one member per host.
//!
//! With unequal hosts an all-reduce uses one member per host: 2(H-1)/H · S there.

use super::choose::BufferAccess;
use super::direct::cost;
use super::{Team, direct, halving, ring, tree};
use crate::call::error::Result;
use crate::call::fold::{Fold, Op};
use crate::call::partition::{Partition, packed};
use crate::call::topology::{host_count, is_even, local_members};
use crate::call::traffic::Traffic;
use crate::lane::Lane;
use crate::memory::scratch::Scratch;
use std::ops::Range;

/// The members with our local index, one per host.
fn line(lane: &mut Lane) -> Team<'_> {
    let (members, me) = (line_of(&lane.hosts, lane.slots.me), lane.hosts[lane.me]);
    Team::new(lane, members, me)
}

fn line_of(hosts: &[usize], local_index: usize) -> Vec<usize> {
    (0..host_count(hosts)).map(|h| local_members(hosts, h)[local_index]).collect()
}

/// One member per host: the first, or the root on its host.
fn leaders_of(hosts: &[usize], root: usize) -> Vec<usize> {
    (0..host_count(hosts))
        .map(|h| if hosts[root] == h { root } else { local_members(hosts, h)[0] })
        .collect()
}

/// The team of leaders. Only leaders may use it.
fn leaders(lane: &mut Lane, root: usize) -> Team<'_> {
    let (members, me) = (leaders_of(&lane.hosts, root), lane.hosts[lane.me]);
    Team::new(lane, members, me)
}

/// The leader of our host, and its local index.
fn local_leader(lane: &Lane, root: usize) -> (usize, usize) {
    let leader = leaders_of(&lane.hosts, root)[lane.hosts[lane.me]];
    let index = lane.locals.iter().position(|m| *m == leader);
    (leader, index.expect("our leader is on our host"))
}

/// The fold within a host. A mean is divided once, at the end of the second level.
fn undivided(fold: &Fold) -> Fold {
    Fold { op: if fold.op == Op::Mean { Op::Sum } else { fold.op }, ..*fold }
}

pub(crate) fn all_reduce(lane: &mut Lane, bytes: &mut [u8], fold: &Fold) -> Result<()> {
    if !is_even(&lane.hosts) {
        return all_reduce_through_leaders(lane, bytes, fold);
    }
    let slices = Partition::of_bytes(bytes.len(), lane.locals.len(), fold.dtype.bytes()).parts();
    let mut slice = Scratch::new(slices[lane.slots.me].len());
    direct::reduce_scatter(lane, bytes, &mut slice, &slices, &undivided(fold))?;
    ring::all_reduce(&mut line(lane), &mut slice, fold)?;
    direct::all_gather(lane, &slice, bytes, &slices, true)
}

fn all_reduce_through_leaders(lane: &mut Lane, bytes: &mut [u8], fold: &Fold) -> Result<()> {
    direct::reduce(lane, bytes, &undivided(fold), 0)?;
    if lane.slots.me == 0 {
        let root = local_members(&lane.hosts, 0)[0];
        ring::all_reduce(&mut leaders(lane, root), bytes, fold)?;
    }
    direct::broadcast(lane, bytes, 0)
}

pub(crate) fn broadcast(lane: &mut Lane, bytes: &mut [u8], root: usize) -> Result<()> {
    let (leader, leader_index) = local_leader(lane, root);
    if leader == lane.me {
        let root_host = lane.hosts[root];
        tree::broadcast(&mut leaders(lane, root), bytes, root_host)?;
    }
    direct::broadcast(lane, bytes, leader_index)
}

pub(crate) fn reduce(lane: &mut Lane, bytes: &mut [u8], fold: &Fold, root: usize) -> Result<()> {
    let (leader, leader_index) = local_leader(lane, root);
    let root_host = lane.hosts[root];
    if lane.me == root {
        direct::reduce(lane, bytes, &undivided(fold), leader_index)?;
        return tree::reduce(&mut leaders(lane, root), bytes, fold, root_host);
    }
    // Only the root's buffer may change, so the leaders of other hosts reduce into a copy.
    let mut copy = Scratch::copy_of(bytes);
    direct::reduce(lane, &mut copy, &undivided(fold), leader_index)?;
    if lane.me == leader {
        tree::reduce(&mut leaders(lane, root), &mut copy, fold, root_host)?;
    }
    Ok(())
}

/// First along our line, then each host's parts within the host.
pub(crate) fn all_gather(lane: &mut Lane, bytes: &mut [u8], parts: &[Range<usize>]) -> Result<()> {
    let line_parts = select(parts, &line_of(&lane.hosts, lane.slots.me));
    ring::all_gather(&mut line(lane), bytes, &line_parts)?;
    for host in 0..host_count(&lane.hosts) {
        let places = select(parts, &local_members(&lane.hosts, host));
        let own = Scratch::copy_of(&bytes[places[lane.slots.me].clone()]);
        direct::all_gather(lane, &own, bytes, &places, true)?;
    }
    Ok(())
}

/// First each host's parts within the host, then along our line.
pub(crate) fn reduce_scatter(
    lane: &mut Lane,
    input: &[u8],
    output: &mut [u8],
    parts: &[Range<usize>],
    fold: &Fold,
) -> Result<()> {
    // The parts of our line's members, stored consecutively.
    let line_parts = select(parts, &line_of(&lane.hosts, lane.slots.me));
    let lengths: Vec<usize> = line_parts.iter().map(|part| part.len()).collect();
    let ranges = packed(&lengths, 1);
    let mut sums = Scratch::new(lengths.iter().sum());
    for host in 0..host_count(&lane.hosts) {
        let slices = select(parts, &local_members(&lane.hosts, host));
        let into = &mut sums[ranges[host].clone()];
        direct::reduce_scatter(lane, input, into, &slices, &undivided(fold))?;
    }
    ring::reduce_scatter(&mut line(lane), &sums, output, &ranges, fold)
}

pub(crate) fn barrier(lane: &mut Lane) -> Result<()> {
    direct::barrier(lane)?;
    if lane.slots.me == 0 {
        let root = local_members(&lane.hosts, 0)[0];
        halving::barrier(&mut leaders(lane, root))?;
    }
    direct::barrier(lane)
}

/// Placement of a member, for the cost formulas.
struct Place {
    host: usize,
    /// Number of members on its host.
    locals: usize,
    local_index: usize,
}

fn place(hosts: &[usize], me: usize) -> Place {
    let locals = local_members(hosts, hosts[me]);
    let index = locals.iter().position(|m| *m == me).expect("every member is on its own host");
    Place { host: hosts[me], locals: locals.len(), local_index: index }
}

pub(crate) fn all_reduce_sent(
    partition: &Partition,
    hosts: &[usize],
    me: usize,
    access: BufferAccess,
) -> Traffic {
    let Place { host, locals, local_index } = place(hosts, me);
    let width = partition.width;
    let slices = Partition { parts: locals, ..*partition }.parts();
    let between = |count: usize| ring::all_reduce_sent(count, width, host_count(hosts), host);
    if is_even(hosts) {
        return cost::reduce_scatter(&slices, local_index, access)
            + between(slices[local_index].len() / width)
            + cost::all_gather(&slices, local_index, true, access);
    }
    let within = cost::reduce(&slices, local_index, 0, access)
        + cost::broadcast(partition.count * width, locals, local_index, 0, access);
    if local_index == 0 { within + between(partition.count) } else { within }
}

pub(crate) fn broadcast_sent(
    bytes: usize,
    hosts: &[usize],
    me: usize,
    root: usize,
    access: BufferAccess,
) -> Traffic {
    let Place { host, locals, local_index } = place(hosts, me);
    let leader = leaders_of(hosts, root)[host];
    let leader_index = place(hosts, leader).local_index;
    let within = cost::broadcast(bytes, locals, local_index, leader_index, access);
    if leader != me {
        return within;
    }
    within + tree::broadcast_sent(bytes, hosts[root], host, host_count(hosts))
}

pub(crate) fn reduce_sent(
    partition: &Partition,
    hosts: &[usize],
    me: usize,
    root: usize,
    access: BufferAccess,
) -> Traffic {
    let Place { host, locals, local_index } = place(hosts, me);
    let leader = leaders_of(hosts, root)[host];
    let slices = Partition { parts: locals, ..*partition }.parts();
    let leader_index = place(hosts, leader).local_index;
    let within = cost::reduce(&slices, local_index, leader_index, access);
    if leader != me {
        return within;
    }
    within + tree::reduce_sent(partition.count * partition.width, hosts[root], host)
}

pub(crate) fn all_gather_sent(
    partition: &Partition,
    hosts: &[usize],
    me: usize,
    access: BufferAccess,
) -> Traffic {
    let (Place { host, local_index, .. }, parts) = (place(hosts, me), partition.parts());
    let within =
        per_host(&parts, hosts).map(|places| cost::all_gather(&places, local_index, true, access));
    let line = select(&parts, &line_of(hosts, local_index));
    ring::all_gather_sent(&line, host) + within.sum()
}

pub(crate) fn reduce_scatter_sent(
    partition: &Partition,
    hosts: &[usize],
    me: usize,
    access: BufferAccess,
) -> Traffic {
    let (Place { host, local_index, .. }, parts) = (place(hosts, me), partition.parts());
    let within =
        per_host(&parts, hosts).map(|slices| cost::reduce_scatter(&slices, local_index, access));
    let line = select(&parts, &line_of(hosts, local_index));
    ring::reduce_scatter_sent(&line, host) + within.sum()
}

pub(crate) fn barrier_sent(hosts: &[usize], me: usize) -> Traffic {
    let is_leader = place(hosts, me).local_index == 0;
    if is_leader { halving::barrier_sent(host_count(hosts)) } else { Traffic::default() }
}

fn select(parts: &[Range<usize>], members: &[usize]) -> Vec<Range<usize>> {
    members.iter().map(|m| parts[*m].clone()).collect()
}

/// The parts of each host's members.
fn per_host(parts: &[Range<usize>], hosts: &[usize]) -> impl Iterator<Item = Vec<Range<usize>>> {
    (0..host_count(hosts)).map(|h| select(parts, &local_members(hosts, h)))
}
