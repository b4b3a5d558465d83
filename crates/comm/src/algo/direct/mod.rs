//! Direct: the members of one host access each other's memory.
//!
//! There are three access methods. All members choose the same one, because they look at the same
//! postings:
//! - *in place*, when all members have mapped all buffers (threads of one process, symmetric buffers or
//!   shared heaps): each member reduces or copies from its peers' memory, between two barriers;
//! - *cross-memory*, for larger buffers of processes that may access each other: the kernel copies
//!   between the processes;
//! - *through slots* otherwise: data passes through the slots of the arena, in rounds small enough to
//!   stay in the caches. A round is filled while the previous one is drained.
//!
//! With L members and S bytes, a member moves
//! - all-reduce: (L-1)/L · S of inputs and S/L of results; a small buffer whole, in one round,
//! - reduce-scatter, all-to-all: (L-1)/L · S,
//! - all-gather, gather: its own S/L; broadcast: S at the root; scatter: (L-1)/L · S at the root.
//!
//! The owner of a slice combines contributions in member order, so the result is the same on all
//! members, in every run and with every access method.

pub(crate) mod cost;
mod cross_memory;
mod pieces;
mod through_slots;

pub(crate) use pieces::Routes;

use crate::call::error::Result;
use crate::call::fold::Fold;
use crate::call::partition::{Partition, longest};
use crate::lane::Lane;
use crate::memory::copy::{copy, copy_slice};
use crate::memory::cross_process::RemoteAddress;
use crate::memory::member::{Bank, SLOT_BYTES};
use pieces::{CROSS_MEMORY_MIN, ONE_ROUND, SliceReduction, count, slices_pay};
use std::ops::Range;

/// How the members access each other's buffers in one call.
enum Access {
    /// Addresses in our own address space, by local member.
    InPlace(Vec<*mut u8>),
    /// Addresses in the members' processes.
    CrossMemory(Vec<RemoteAddress>),
    Slots,
}

/// Announces our call and buffer, waits for all members, compares the calls and chooses an access
/// method. Cross-memory is used only if it `pays`, which must be equal on all members. Unless the result
/// is `Slots`, the call must end with `close` or `settle`.
fn open(lane: &mut Lane, data: *const u8, len: usize, pays: bool) -> Result<Access> {
    let access = announce(lane, data, len).and_then(|()| choose_access(lane, pays));
    if access.is_err() {
        lane.slots.wait_until_not_accessed();
    }
    access
}

fn announce(lane: &mut Lane, data: *const u8, len: usize) -> Result<()> {
    let location = lane.locate(data, len);
    let (slots, watch) = lane.slots();
    slots.announce(watch, location);
    slots.barrier(watch)?;
    slots.compare(watch)
}

fn choose_access(lane: &mut Lane, pays: bool) -> Result<Access> {
    if let Some(buffers) = lane.mapped_buffers() {
        return begin_access(lane).map(|()| Access::InPlace(buffers));
    }
    if pays && lane.has_cross_memory() {
        let remote = |member| {
            let location = lane.slots.location(member);
            RemoteAddress { pid: location.pid, at: location.address }
        };
        let remotes = (0..lane.slots.members()).map(remote).collect();
        return begin_access(lane).map(|()| Access::CrossMemory(remotes));
    }
    Ok(Access::Slots)
}

/// Begins to access the peers' memory, unless the world is broken and they may release it.
fn begin_access(lane: &mut Lane) -> Result<()> {
    let (slots, watch) = lane.slots();
    slots.set_accessing(true);
    let intact = watch.check_intact();
    if intact.is_err() {
        slots.set_accessing(false);
    }
    intact
}

/// Waits until all members have finished accessing all buffers, even if the world breaks meanwhile and
/// some members never reach the barrier.
fn close(lane: &mut Lane) -> Result<()> {
    lane.slots.set_accessing(false);
    let (slots, watch) = lane.slots();
    let met = slots.barrier(watch);
    if met.is_err() {
        lane.slots.wait_until_not_accessed();
    }
    met
}

/// Closes a call that may have failed. After a failure the others find out by themselves, but our buffer
/// stays valid until they have stopped accessing it.
fn settle(lane: &mut Lane, done: Result<()>) -> Result<()> {
    if done.is_ok() {
        return close(lane);
    }
    lane.slots.set_accessing(false);
    lane.slots.wait_until_not_accessed();
    done
}

pub(crate) fn barrier(lane: &mut Lane) -> Result<()> {
    announce(lane, std::ptr::null(), 0)
}

pub(crate) fn all_reduce(lane: &mut Lane, bytes: &mut [u8], fold: &Fold) -> Result<()> {
    if bytes.len() <= ONE_ROUND {
        return through_slots::all_reduce_in_one_round(lane, bytes, fold);
    }
    reduce_slices(lane, bytes, fold, None)
}

/// Reduces into the root's buffer; the others are unchanged.
pub(crate) fn reduce(lane: &mut Lane, bytes: &mut [u8], fold: &Fold, root: usize) -> Result<()> {
    reduce_slices(lane, bytes, fold, Some(root))
}

fn reduce_slices(
    lane: &mut Lane,
    bytes: &mut [u8],
    fold: &Fold,
    root: Option<usize>,
) -> Result<()> {
    let members = lane.slots.members();
    let partition = Partition::of_bytes(bytes.len(), members, fold.dtype.bytes());
    let reduction = SliceReduction { data: bytes.as_mut_ptr(), partition, fold, root };
    let pays = slices_pay(members, partition.largest());
    match open(lane, reduction.data, bytes.len(), pays)? {
        Access::InPlace(buffers) => {
            let own_slice = partition.bytes(lane.slots.me);
            let receivers = root.map_or(&buffers[..], |root| &buffers[root..=root]);
            // SAFETY: every buffer is as long as ours (the calls were compared), and nobody else
            // accesses this slice of any buffer before the next barrier.
            unsafe { combine_slice(&buffers, receivers, &own_slice, fold) };
            close(lane)
        }
        Access::CrossMemory(remotes) => {
            let done = cross_memory::reduce_slices(lane, &remotes, &reduction);
            settle(lane, done)
        }
        Access::Slots => through_slots::reduce_slices(lane, &reduction),
    }
}

/// # Safety
/// The sources must be readable and the destinations writable in `range`, by us alone.
unsafe fn combine_slice(
    sources: &[*mut u8],
    destinations: &[*mut u8],
    range: &Range<usize>,
    fold: &Fold,
) {
    let at = |p: &*mut u8| p.wrapping_add(range.start);
    let sources: Vec<*const u8> = sources.iter().map(|p| at(p).cast_const()).collect();
    let destinations: Vec<*mut u8> = destinations.iter().map(at).collect();
    // SAFETY: guaranteed by the caller.
    unsafe { fold.combine(&sources, &destinations, range.len(), true) };
}

/// Combines `slices[i]` of all members' `input` into the `output` of local member i.
pub(crate) fn reduce_scatter(
    lane: &mut Lane,
    input: &[u8],
    output: &mut [u8],
    slices: &[Range<usize>],
    fold: &Fold,
) -> Result<()> {
    let own_slice = &slices[lane.slots.me];
    let pays = slices_pay(lane.slots.members(), longest(slices));
    match open(lane, input.as_ptr(), input.len(), pays)? {
        Access::InPlace(buffers) => {
            // Shifted so that the slice is written to the start of the output.
            let to = output.as_mut_ptr().wrapping_sub(own_slice.start);
            // SAFETY: all inputs are as long as ours and only read until the barrier; the output is
            // ours.
            unsafe { combine_slice(&buffers, &[to], own_slice, fold) };
            close(lane)
        }
        Access::CrossMemory(remotes) => {
            let remotes: Vec<_> = remotes.iter().map(|r| r.offset(own_slice.start)).collect();
            let own = &input[own_slice.clone()];
            let done = cross_memory::reduce_scatter(lane, &remotes, own, output, fold);
            settle(lane, done)
        }
        Access::Slots => through_slots::reduce_scatter(lane, input, output, slices, fold),
    }
}

pub(crate) fn all_to_all(
    lane: &mut Lane,
    input: &[u8],
    output: &mut [u8],
    routes: &Routes,
) -> Result<()> {
    let me = lane.slots.me;
    let (own, total) = (&input[routes.outgoing[me].clone()], output.len());
    copy_slice(own, &mut output[routes.incoming[me].clone()], total);
    match open(lane, input.as_ptr(), input.len(), routes.longest >= CROSS_MEMORY_MIN)? {
        Access::InPlace(buffers) => {
            for peer in lane.slots.peers() {
                let to = &mut output[routes.incoming[peer].clone()];
                let from = buffers[peer].wrapping_add(routes.theirs[peer].start);
                // SAFETY: the peer's input is only read until the barrier; the output is ours.
                unsafe { copy(from, to.as_mut_ptr(), to.len(), total) };
            }
            close(lane)
        }
        Access::CrossMemory(remotes) => {
            let mut peers = lane.slots.peers();
            let done = peers.try_for_each(|peer| {
                let from = remotes[peer].offset(routes.theirs[peer].start);
                let to = &mut output[routes.incoming[peer].clone()];
                cross_memory::pull_from(lane, peer, from, to)
            });
            settle(lane, done)
        }
        Access::Slots => through_slots::all_to_all(lane, input, output, routes),
    }
}

/// Sends each local member its range of the root's input.
pub(crate) fn scatter(
    lane: &mut Lane,
    input: &[u8],
    ranges: &[Range<usize>],
    output: &mut [u8],
    root: usize,
) -> Result<()> {
    let me = lane.slots.me;
    if me == root {
        output.copy_from_slice(&input[ranges[me].clone()]);
    }
    match open(lane, input.as_ptr(), input.len(), longest(ranges) >= CROSS_MEMORY_MIN)? {
        Access::InPlace(buffers) => {
            if me != root {
                let from = buffers[root].wrapping_add(ranges[me].start);
                // SAFETY: the root's input is only read until the barrier; the output is ours.
                unsafe {
                    std::ptr::copy_nonoverlapping(from, output.as_mut_ptr(), output.len());
                }
            }
            close(lane)
        }
        Access::CrossMemory(remotes) => {
            let done = match me == root {
                true => Ok(()),
                false => {
                    let from = remotes[root].offset(ranges[me].start);
                    cross_memory::pull_from(lane, root, from, output)
                }
            };
            settle(lane, done)
        }
        Access::Slots => through_slots::scatter(lane, input, ranges, output, root),
    }
}

/// Gathers the inputs of all local members into `places` of `output`, on the members that receive.
pub(crate) fn all_gather(
    lane: &mut Lane,
    input: &[u8],
    output: &mut [u8],
    places: &[Range<usize>],
    receives: bool,
) -> Result<()> {
    let me = lane.slots.me;
    let total = output.len();
    if receives {
        copy_slice(input, &mut output[places[me].clone()], total);
    }
    match open(lane, input.as_ptr(), input.len(), longest(places) >= CROSS_MEMORY_MIN)? {
        Access::InPlace(buffers) => {
            for peer in lane.slots.peers().filter(|_| receives) {
                let to = &mut output[places[peer].clone()];
                // SAFETY: the peer's input is only read until the barrier; the output is ours.
                unsafe { copy(buffers[peer], to.as_mut_ptr(), to.len(), total) };
            }
            close(lane)
        }
        Access::CrossMemory(remotes) => {
            let mut peers = lane.slots.peers().filter(|_| receives);
            let done = peers.try_for_each(|peer| {
                let to = &mut output[places[peer].clone()];
                cross_memory::pull_from(lane, peer, remotes[peer], to)
            });
            settle(lane, done)
        }
        Access::Slots => through_slots::all_gather(lane, input, output, places, receives),
    }
}

pub(crate) fn broadcast(lane: &mut Lane, bytes: &mut [u8], root: usize) -> Result<()> {
    let me = lane.slots.me;
    let data = bytes.as_mut_ptr();
    match open(lane, data, bytes.len(), bytes.len() >= CROSS_MEMORY_MIN)? {
        Access::InPlace(buffers) => {
            let half = cross_memory::pulled_by_receiver(bytes.len(), buffers.len());
            // With a single receiver, the root would be idle, so it writes the second half.
            let (part, to) = match me == root {
                false => (0..half, Some(data)),
                true => (half..bytes.len(), (buffers.len() == 2).then(|| buffers[1 - root])),
            };
            if let Some(to) = to {
                let from = buffers[root].wrapping_add(part.start);
                // SAFETY: the root's buffer is only read until the barrier, and each half of a
                // receiver's buffer is written by one member.
                unsafe { copy(from, to.wrapping_add(part.start), part.len(), bytes.len()) };
            }
            close(lane)
        }
        Access::CrossMemory(remotes) => {
            let done = cross_memory::broadcast(lane, &remotes, bytes, root);
            settle(lane, done)
        }
        Access::Slots => through_slots::broadcast(lane, bytes, root),
    }
}

/// All-gathers a few words per member, such as counts that must be known before data can move.
pub(crate) fn exchange_words(lane: &mut Lane, words: &[u64]) -> Result<Vec<Vec<u64>>> {
    let location = lane.locate(std::ptr::null(), 0);
    let (slots, watch) = lane.slots();
    slots.announce(watch, location);
    let round = slots.begin(Bank::Inputs, watch)?;
    assert!(words.len() * 8 <= SLOT_BYTES, "a row of counts fits into a slot");
    // SAFETY: our own slot, aligned and large enough.
    unsafe {
        let slot = slots.own_slot(Bank::Inputs, round).cast::<u64>();
        std::ptr::copy_nonoverlapping(words.as_ptr(), slot, words.len());
    }
    slots.fill(Bank::Inputs, round);
    let mut rows = vec![words.to_vec(); slots.members()];
    for peer in slots.peers() {
        let slot = slots.peer_slot(peer, Bank::Inputs, round, watch)?.cast::<u64>();
        // SAFETY: a filled slot with as many words as ours.
        rows[peer] = unsafe { std::slice::from_raw_parts(slot, words.len()) }.to_vec();
    }
    slots.compare(watch)?;
    slots.drain(Bank::Inputs, round);
    count(lane, 1, 8 * words.len());
    Ok(rows)
}
