//! Direct: the members of one host reach each other's memory.
//!
//! Three ways, and all members take the same one, because they look at the same postings:
//! - *in place*, when everybody can reach everybody's buffer (threads of one process, or symmetric
//!   buffers): each member reduces or copies straight from its peers' memory, between two meetings;
//! - *pulled*, for larger buffers of processes that may read each other: the kernel copies what is
//!   needed from the peer's buffer;
//! - *staged* otherwise: data passes through the slots of the arena in rounds small enough to stay in
//!   the caches, and a round is filled while the one before is drained.
//!
//! With L members and S bytes, a member moves
//! - all-reduce: (L-1)/L · S of inputs and S/L of results; a small buffer goes whole, in one round,
//! - reduce-scatter, all-to-all: (L-1)/L · S,
//! - all-gather, gather: its own S/L; broadcast: S at the root; scatter: (L-1)/L · S at the root.
//!
//! Contributions are combined by the owner of a slice in the order of the seats, so the result is the
//! same on every member, in every run and in each of the three ways.

mod pulled;
pub(crate) mod sent;
mod staged;

use crate::call::cut::Cut;
use crate::call::error::Result;
use crate::call::fold::Fold;
use crate::group::lane::Lane;
use crate::memory::copy::{copy, copy_slice};
use crate::memory::reach::Remote;
use crate::memory::stage::SLOT_BYTES;
use std::ops::Range;

/// Up to this size, an all-reduce is one round in which everybody reads everything.
pub(crate) const ONE_ROUND: usize = 16 << 10;
/// From this many bytes per member on, a call of the kernel costs less than a second copy.
const PULL_FROM: usize = 16 << 10;
/// Up to this many members, pulling slices from each costs less than passing them through slots.
const PULL_MEMBERS: usize = 3;

const INPUTS: usize = 0;
const RESULTS: usize = 1;

/// How the members reach each other's data in this call.
enum Way {
    /// Addresses in our own address space, by seat.
    InPlace(Vec<*mut u8>),
    /// Addresses in the members' processes.
    Pulled(Vec<Remote>),
    Staged,
}

/// Says what we call and where our data lies, meets everybody, and compares. Pulls if it `pays`,
/// which must be equal on all members. Unless it is staged, what was opened must be settled.
fn open(lane: &mut Lane, data: *const u8, len: usize, pays: bool) -> Result<Way> {
    let way = agree(lane, data, len).and_then(|()| way(lane, pays));
    if way.is_err() {
        lane.stages.await_hands_off();
    }
    way
}

fn agree(lane: &mut Lane, data: *const u8, len: usize) -> Result<()> {
    let window = lane.window(data, len);
    let (stages, watch) = lane.stages();
    stages.announce(watch, window);
    stages.meet(watch)?;
    stages.compare(watch)
}

fn way(lane: &mut Lane, pays: bool) -> Result<Way> {
    if let Some(windows) = lane.reachable() {
        return reach(lane).map(|()| Way::InPlace(windows));
    }
    if pays && lane.may_pull() {
        let window = |seat| {
            let window = lane.stages.window(seat);
            Remote { pid: window.pid, at: window.at }
        };
        let remotes = (0..lane.stages.members()).map(window).collect();
        return reach(lane).map(|()| Way::Pulled(remotes));
    }
    Ok(Way::Staged)
}

/// Whether pulling slices of this length from every peer is cheaper than passing them on.
fn slices_pay(members: usize, longest: usize) -> bool {
    longest >= PULL_FROM && members <= PULL_MEMBERS
}

/// Begins to touch the peers' memory, unless the world is broken and they may take it away.
fn reach(lane: &mut Lane) -> Result<()> {
    let (stages, watch) = lane.stages();
    stages.reach(true);
    let standing = watch.standing();
    if standing.is_err() {
        stages.reach(false);
    }
    standing
}

/// Nobody goes on before everybody is done with everybody's memory, even if the world broke meanwhile
/// and some never come to the meeting.
fn close(lane: &mut Lane) -> Result<()> {
    lane.stages.reach(false);
    let (stages, watch) = lane.stages();
    let met = stages.meet(watch);
    if met.is_err() {
        lane.stages.await_hands_off();
    }
    met
}

/// Closes a call that may have failed: then the others are left to find that out by themselves, but
/// our buffer stays until they have let go of it.
fn settle(lane: &mut Lane, done: Result<()>) -> Result<()> {
    if done.is_ok() {
        return close(lane);
    }
    lane.stages.reach(false);
    lane.stages.await_hands_off();
    done
}

pub(crate) fn barrier(lane: &mut Lane) -> Result<()> {
    agree(lane, std::ptr::null(), 0)
}

fn slices(lane: &Lane, bytes: usize, fold: &Fold) -> Cut {
    let width = fold.dtype.bytes();
    Cut { count: bytes / width, parts: lane.stages.members(), width }
}

pub(crate) fn all_reduce(lane: &mut Lane, bytes: &mut [u8], fold: &Fold) -> Result<()> {
    if bytes.len() <= ONE_ROUND {
        return staged::all_reduce_in_one_round(lane, bytes, fold);
    }
    let data = bytes.as_mut_ptr();
    let cut = slices(lane, bytes.len(), fold);
    let pays = slices_pay(lane.stages.members(), cut.largest());
    match open(lane, data, bytes.len(), pays)? {
        Way::InPlace(windows) => {
            let mine = cut.bytes(lane.stages.me);
            // SAFETY: every window is as long as our buffer (the calls were compared), and by the cut
            // nobody else touches this slice of any window before the meeting below.
            unsafe { combine_slice(&windows, &windows, &mine, fold) };
            close(lane)
        }
        Way::Pulled(remotes) => {
            let done = pulled::reduce_slices(lane, &remotes, data, &cut, fold, None);
            settle(lane, done)
        }
        Way::Staged => staged::reduce_slices(lane, data, &cut, fold, None),
    }
}

/// The root's buffer gets the result; the others' stay as they are.
pub(crate) fn reduce(lane: &mut Lane, bytes: &mut [u8], fold: &Fold, root: usize) -> Result<()> {
    let data = bytes.as_mut_ptr();
    let cut = slices(lane, bytes.len(), fold);
    let pays = slices_pay(lane.stages.members(), cut.largest());
    match open(lane, data, bytes.len(), pays)? {
        Way::InPlace(windows) => {
            let mine = cut.bytes(lane.stages.me);
            // SAFETY: as in `all_reduce`; only the root's window is written.
            unsafe { combine_slice(&windows, &windows[root..=root], &mine, fold) };
            close(lane)
        }
        Way::Pulled(remotes) => {
            let done = pulled::reduce_slices(lane, &remotes, data, &cut, fold, Some(root));
            settle(lane, done)
        }
        Way::Staged => staged::reduce_slices(lane, data, &cut, fold, Some(root)),
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
    // SAFETY: the caller's promise.
    unsafe { fold.combine(&sources, &destinations, range.len(), true) };
}

/// `slices[i]` of everybody's `input` is combined at seat i, into its `output`.
pub(crate) fn reduce_scatter(
    lane: &mut Lane,
    input: &[u8],
    output: &mut [u8],
    slices: &[Range<usize>],
    fold: &Fold,
) -> Result<()> {
    let pays = slices_pay(lane.stages.members(), longest(slices));
    match open(lane, input.as_ptr(), input.len(), pays)? {
        Way::InPlace(windows) => {
            let mine = &slices[lane.stages.me];
            // Shifted so that the slice lands at the start of the output.
            let to = output.as_mut_ptr().wrapping_sub(mine.start);
            // SAFETY: everybody's input is as long as ours and only read until the meeting; the
            // output is ours.
            unsafe { combine_slice(&windows, &[to], mine, fold) };
            close(lane)
        }
        Way::Pulled(remotes) => {
            let done = pulled::reduce_scatter(lane, &remotes, input, output, slices, fold);
            settle(lane, done)
        }
        Way::Staged => staged::reduce_scatter(lane, input, output, slices, fold),
    }
}

/// Where the pieces of an all-to-all lie.
pub(crate) struct Routes<'a> {
    /// In our input, what goes to each seat.
    pub outgoing: &'a [Range<usize>],
    /// In our output, what comes from each seat.
    pub incoming: &'a [Range<usize>],
    /// In the input of each seat, what comes to us.
    pub theirs: &'a [Range<usize>],
    /// The longest piece of all members.
    pub longest: usize,
}

pub(crate) fn all_to_all(
    lane: &mut Lane,
    input: &[u8],
    output: &mut [u8],
    routes: &Routes,
) -> Result<()> {
    let me = lane.stages.me;
    let (own, total) = (&input[routes.outgoing[me].clone()], output.len());
    copy_slice(own, &mut output[routes.incoming[me].clone()], total);
    let to = output.as_mut_ptr();
    match open(lane, input.as_ptr(), input.len(), routes.longest >= PULL_FROM)? {
        Way::InPlace(windows) => {
            for peer in lane.stages.peers() {
                let place = &routes.incoming[peer];
                // SAFETY: the peer's input is only read until the meeting; the output is ours.
                unsafe {
                    let from = windows[peer].add(routes.theirs[peer].start);
                    copy(from, to.add(place.start), place.len(), output.len());
                }
            }
            close(lane)
        }
        Way::Pulled(remotes) => {
            let mut peers = lane.stages.peers();
            let done = peers.try_for_each(|peer| {
                let from = remotes[peer].offset(routes.theirs[peer].start);
                pulled::take(lane, peer, from, &mut output[routes.incoming[peer].clone()])
            });
            settle(lane, done)
        }
        Way::Staged => staged::all_to_all(lane, input, output, routes),
    }
}

/// Seat `root` has a range for everybody; each gets its own.
pub(crate) fn scatter(
    lane: &mut Lane,
    input: &[u8],
    ranges: &[Range<usize>],
    output: &mut [u8],
    root: usize,
) -> Result<()> {
    let me = lane.stages.me;
    if me == root {
        output.copy_from_slice(&input[ranges[me].clone()]);
    }
    match open(lane, input.as_ptr(), input.len(), longest(ranges) >= PULL_FROM)? {
        Way::InPlace(windows) => {
            if me != root {
                let (to, len) = (output.as_mut_ptr(), output.len());
                // SAFETY: the root's input is only read until the meeting; the output is ours.
                unsafe {
                    std::ptr::copy_nonoverlapping(windows[root].add(ranges[me].start), to, len);
                }
            }
            close(lane)
        }
        Way::Pulled(remotes) => {
            let done = match me == root {
                true => Ok(()),
                false => pulled::take(lane, root, remotes[root].offset(ranges[me].start), output),
            };
            settle(lane, done)
        }
        Way::Staged => staged::scatter(lane, input, ranges, output, root),
    }
}

/// Our `input` goes to everybody who wants it; what seat p brings comes to `places[p]` of `output`
/// where `wants(p)`. Our own is put there too.
pub(crate) fn all_gather(
    lane: &mut Lane,
    input: &[u8],
    output: &mut [u8],
    places: &[Range<usize>],
    wanted: bool,
) -> Result<()> {
    let me = lane.stages.me;
    if wanted {
        let total = output.len();
        copy_slice(input, &mut output[places[me].clone()], total);
    }
    match open(lane, input.as_ptr(), input.len(), longest(places) >= PULL_FROM)? {
        Way::InPlace(windows) => {
            for peer in lane.stages.peers().filter(|_| wanted) {
                let total = output.len();
                let to = &mut output[places[peer].clone()];
                // SAFETY: the peer's input is only read until the meeting; the output is ours.
                unsafe { copy(windows[peer], to.as_mut_ptr(), to.len(), total) };
            }
            close(lane)
        }
        Way::Pulled(remotes) => {
            let mut peers = lane.stages.peers().filter(|_| wanted);
            let done = peers.try_for_each(|peer| {
                pulled::take(lane, peer, remotes[peer], &mut output[places[peer].clone()])
            });
            settle(lane, done)
        }
        Way::Staged => staged::all_gather(lane, input, output, places, wanted),
    }
}

pub(crate) fn broadcast(lane: &mut Lane, bytes: &mut [u8], root: usize) -> Result<()> {
    let me = lane.stages.me;
    let data = bytes.as_mut_ptr();
    match open(lane, data, bytes.len(), bytes.len() >= PULL_FROM)? {
        Way::InPlace(windows) => {
            let half = pulled::pulled_of_broadcast(bytes.len(), windows.len());
            // With only one to receive, the root has nothing to do meanwhile: it writes the second
            // half.
            let (part, to) = match me == root {
                false => (0..half, Some(data)),
                true => (half..bytes.len(), (windows.len() == 2).then(|| windows[1 - root])),
            };
            if let Some(to) = to {
                let from = windows[root].wrapping_add(part.start);
                // SAFETY: the root's buffer is only read until the meeting, and of a receiver's each
                // half is written by one of us.
                unsafe { copy(from, to.wrapping_add(part.start), part.len(), bytes.len()) };
            }
            close(lane)
        }
        Way::Pulled(remotes) => {
            let done = pulled::broadcast(lane, &remotes, bytes, root);
            settle(lane, done)
        }
        Way::Staged => staged::broadcast(lane, bytes, root),
    }
}

/// Shows `words` to everybody and sees everybody's: for what must be known before data can flow.
pub(crate) fn exchange_words(lane: &mut Lane, words: &[u64]) -> Result<Vec<Vec<u64>>> {
    let window = lane.window(std::ptr::null(), 0);
    let (stages, watch) = lane.stages();
    stages.announce(watch, window);
    let round = stages.begin(INPUTS, watch)?;
    assert!(words.len() * 8 <= SLOT_BYTES, "a row of counts fits into a slot");
    // SAFETY: our own slot, aligned and large enough.
    unsafe {
        let slot = stages.own_slot(INPUTS, round).cast::<u64>();
        std::ptr::copy_nonoverlapping(words.as_ptr(), slot, words.len());
    }
    stages.fill(INPUTS, round);
    let mut rows = vec![words.to_vec(); stages.members()];
    for peer in stages.peers() {
        let slot = stages.slot_of(peer, INPUTS, round, watch)?.cast::<u64>();
        // SAFETY: a filled slot with as many words as ours.
        rows[peer] = unsafe { std::slice::from_raw_parts(slot, words.len()) }.to_vec();
    }
    stages.compare(watch)?;
    stages.drain(INPUTS, round);
    count(lane, 1, 8 * words.len());
    Ok(rows)
}

fn longest(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(|r| r.len()).max().unwrap_or(0)
}

/// Counts what passes through our slots and what we copy out of peers' processes, see `sent`.
fn count(lane: &mut Lane, rounds: usize, bytes: usize) {
    // Who is alone passes nothing on.
    if lane.stages.members() == 1 {
        return;
    }
    lane.traffic.messages += rounds as u64;
    lane.traffic.bytes += bytes as u64;
}
