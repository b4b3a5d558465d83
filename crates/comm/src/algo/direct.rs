//! Direct: the members of one host read and write memory that all of them have mapped.
//!
//! Two ways, and all members take the same one:
//! - *in place*, when everybody can reach everybody's buffer (threads of one process, or symmetric
//!   buffers): each member reduces or copies straight from its peers' memory, between two meetings;
//! - *staged* otherwise: data passes through the slots of the arena in rounds small enough to stay in
//!   the caches, and a round is filled while the one before is drained.
//!
//! With L members and S bytes, a member moves
//! - all-reduce: (L-1)/L · S into its slots and S/L as result; a small buffer goes whole, in one round,
//! - reduce-scatter, all-to-all: (L-1)/L · S,
//! - all-gather, gather: its own S/L; broadcast: S at the root; scatter: (L-1)/L · S at the root.
//!
//! Contributions are combined by the owner of a slice in the order of the seats, so the result is the
//! same on every member, in every run.

use crate::cut::Cut;
use crate::error::Result;
use crate::fold::Fold;
use crate::lane::Lane;
use crate::stage::SLOT_BYTES;
use std::ops::Range;

/// Up to this size, an all-reduce is one round in which everybody reads everything.
pub(crate) const ONE_ROUND: usize = 16 << 10;

const INPUTS: usize = 0;
const RESULTS: usize = 1;

/// Says what we call and where our data lies, meets everybody, and compares. Gives the addresses of
/// all members' data if all can be reached in place: then `close` must follow.
fn open(lane: &mut Lane, data: *const u8, len: usize) -> Result<Option<Vec<*mut u8>>> {
    let windows = agree(lane, data, len).and_then(|()| match lane.reachable() {
        Some(windows) => reach(lane).map(|()| Some(windows)),
        None => Ok(None),
    });
    if windows.is_err() {
        lane.stages.await_hands_off();
    }
    windows
}

fn agree(lane: &mut Lane, data: *const u8, len: usize) -> Result<()> {
    let window = lane.window(data, len);
    let (stages, watch) = lane.stages();
    stages.announce(watch, window);
    stages.meet(watch)?;
    stages.compare(watch)
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

/// Ends what `open` began: we are done with the peers' memory, and they with ours, even if the world
/// broke meanwhile and they never come to the meeting.
fn close(lane: &mut Lane) -> Result<()> {
    lane.stages.reach(false);
    let (stages, watch) = lane.stages();
    let met = stages.meet(watch);
    if met.is_err() {
        lane.stages.await_hands_off();
    }
    met
}

pub(crate) fn barrier(lane: &mut Lane) -> Result<()> {
    agree(lane, std::ptr::null(), 0)
}

pub(crate) fn all_reduce(lane: &mut Lane, bytes: &mut [u8], fold: &Fold) -> Result<()> {
    if bytes.len() <= ONE_ROUND {
        return all_reduce_in_one_round(lane, bytes, fold);
    }
    let data = bytes.as_mut_ptr();
    let members = lane.stages.members();
    let cut =
        Cut { count: bytes.len() / fold.dtype.size(), parts: members, width: fold.dtype.size() };
    match open(lane, data, bytes.len())? {
        Some(windows) => {
            let mine = cut.bytes(lane.stages.me);
            // SAFETY: every window is as long as our buffer (the calls were compared), and by the cut
            // nobody else touches this slice of any window before the meeting below.
            unsafe { combine_slice(&windows, &windows, &mine, fold) };
            close(lane)
        }
        None => reduce_slices(lane, data, &cut, fold, |_| true, true),
    }
}

/// The root's buffer gets the result; the others' stay as they are.
pub(crate) fn reduce(lane: &mut Lane, bytes: &mut [u8], fold: &Fold, root: usize) -> Result<()> {
    let data = bytes.as_mut_ptr();
    let members = lane.stages.members();
    let cut =
        Cut { count: bytes.len() / fold.dtype.size(), parts: members, width: fold.dtype.size() };
    let at_root = lane.stages.me == root;
    match open(lane, data, bytes.len())? {
        Some(windows) => {
            let mine = cut.bytes(lane.stages.me);
            // SAFETY: as in `all_reduce`; only the root's window is written.
            unsafe { combine_slice(&windows, &windows[root..=root], &mine, fold) };
            close(lane)
        }
        None => reduce_slices(lane, data, &cut, fold, |_| at_root, at_root),
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
    // SAFETY: the caller's promise.
    let at = |p: &*mut u8| unsafe { p.add(range.start) };
    let sources: Vec<*const u8> = sources.iter().map(|p| at(p).cast_const()).collect();
    let destinations: Vec<*mut u8> = destinations.iter().map(at).collect();
    // SAFETY: the caller's promise.
    unsafe { fold.combine(&sources, &destinations, range.len(), true) };
}

fn all_reduce_in_one_round(lane: &mut Lane, bytes: &mut [u8], fold: &Fold) -> Result<()> {
    let window = lane.window(std::ptr::null(), 0);
    let (stages, watch) = lane.stages();
    stages.announce(watch, window);
    let round = stages.begin(INPUTS, watch)?;
    let slot = stages.own_slot(INPUTS, round);
    // SAFETY: our own slot, free since `begin`, and longer than a small buffer.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot, bytes.len()) };
    stages.fill(INPUTS, round);
    let mut sources: Vec<*const u8> = vec![slot; stages.members()];
    for peer in stages.peers() {
        sources[peer] = stages.slot_of(peer, INPUTS, round, watch)?;
    }
    stages.compare(watch)?;
    // SAFETY: the slots are filled and not drained; `bytes` is ours.
    unsafe { fold.combine(&sources, &[bytes.as_mut_ptr()], bytes.len(), true) };
    stages.drain(INPUTS, round);
    count(lane, 1, bytes.len());
    Ok(())
}

/// The staged reduction: slices of the inputs go to their owners, and the owners' results to whoever
/// `wants` the slice of a seat; our own result stays in `data` if `keep`.
fn reduce_slices(
    lane: &mut Lane,
    data: *mut u8,
    cut: &Cut,
    fold: &Fold,
    wants: impl Fn(usize) -> bool,
    keep: bool,
) -> Result<()> {
    let members = lane.stages.members();
    let slices: Vec<Range<usize>> = cut.parts();
    let lanes = Deal::over(&slices, members);
    let mut moved = 0;
    let mut inputs = Vec::new();
    let mut results = Vec::new();
    for turn in 0..lanes.rounds + 2 {
        // Three things at a time: the inputs of this turn, the sums of the one before, and the
        // results of the one before that.
        let (stages, watch) = lane.stages();
        let me = stages.me;
        if turn < lanes.rounds {
            let round = stages.begin(INPUTS, watch)?;
            let slot = stages.own_slot(INPUTS, round);
            for peer in stages.peers() {
                let range = lanes.piece(&slices[peer], turn);
                // SAFETY: our own buffer to our own slot, each peer's piece in its place there.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        data.add(range.start),
                        slot.add(peer * lanes.stride),
                        range.len(),
                    );
                }
                moved += range.len();
            }
            stages.fill(INPUTS, round);
            inputs.push(round);
        }
        if turn >= 1 && turn - 1 < lanes.rounds {
            let round = inputs[turn - 1];
            let range = lanes.piece(&slices[me], turn - 1);
            let own = data.wrapping_add(range.start);
            let mut sources = vec![own.cast_const(); members];
            for peer in stages.peers() {
                let slot = stages.slot_of(peer, INPUTS, round, watch)?;
                // SAFETY: our piece of the peer's slot.
                sources[peer] = unsafe { slot.add(me * lanes.stride) };
            }
            let result = stages.begin(RESULTS, watch)?;
            let slot = stages.own_slot(RESULTS, result);
            let destinations = [slot, own];
            let destinations = if keep { &destinations[..] } else { &destinations[..1] };
            // SAFETY: filled slots, our own buffer, our own slot.
            unsafe { fold.combine(&sources, destinations, range.len(), true) };
            stages.drain(INPUTS, round);
            stages.fill(RESULTS, result);
            moved += range.len();
            results.push(result);
        }
        if turn >= 2 {
            let round = results[turn - 2];
            for peer in stages.peers().filter(|p| wants(*p)) {
                let range = lanes.piece(&slices[peer], turn - 2);
                let slot = stages.slot_of(peer, RESULTS, round, watch)?;
                // SAFETY: a filled slot to our own buffer.
                unsafe { std::ptr::copy_nonoverlapping(slot, data.add(range.start), range.len()) };
            }
            stages.drain(RESULTS, round);
        }
    }
    count(lane, 2 * lanes.rounds, moved);
    Ok(())
}

/// `slices[i]` of everybody's `input` is combined at seat i, into its `output`.
pub(crate) fn reduce_scatter(
    lane: &mut Lane,
    input: &[u8],
    output: &mut [u8],
    slices: &[Range<usize>],
    fold: &Fold,
) -> Result<()> {
    let me = lane.stages.me;
    let to = output.as_mut_ptr();
    if let Some(windows) = open(lane, input.as_ptr(), input.len())? {
        let mine = &slices[me];
        // SAFETY: everybody's input is as long as ours and only read until the meeting; the output
        // is ours. Shifted so that the slice lands at the start of the output.
        unsafe { combine_slice(&windows, &[to.wrapping_sub(mine.start)], mine, fold) };
        return close(lane);
    }
    let members = lane.stages.members();
    let from = Side { data: input.as_ptr(), ranges: slices.to_vec() };
    deal(lane, &from, slices, |turn_range, slots| {
        let mut sources: Vec<*const u8> = slots.to_vec();
        sources[me] = input[slices[me].start + turn_range.start..].as_ptr();
        debug_assert_eq!(sources.len(), members);
        // SAFETY: filled slots and our own input, to our own output.
        unsafe {
            fold.combine(&sources, &[to.add(turn_range.start)], turn_range.len(), true);
        }
    })
}

/// `outgoing[q]` of our input goes to seat q; from seat p comes what it has for us, `incoming[p]` of
/// our output. `theirs[p]` is where it lies in the input of p.
pub(crate) fn all_to_all(
    lane: &mut Lane,
    input: &[u8],
    outgoing: &[Range<usize>],
    output: &mut [u8],
    incoming: &[Range<usize>],
    theirs: &[Range<usize>],
    longest: usize,
) -> Result<()> {
    let me = lane.stages.me;
    output[incoming[me].clone()].copy_from_slice(&input[outgoing[me].clone()]);
    let to = output.as_mut_ptr();
    if let Some(windows) = open(lane, input.as_ptr(), input.len())? {
        for peer in lane.stages.peers() {
            // SAFETY: the peer's input is only read until the meeting; the output is ours.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    windows[peer].add(theirs[peer].start),
                    to.add(incoming[peer].start),
                    incoming[peer].len(),
                );
            }
        }
        return close(lane);
    }
    let from = Side { data: input.as_ptr(), ranges: outgoing.to_vec() };
    deal_each(lane, &from, longest, |peer, range, slot| {
        let range = range.start.min(incoming[peer].len())..range.end.min(incoming[peer].len());
        // SAFETY: a filled slot to our own output.
        unsafe {
            let to = to.add(incoming[peer].start + range.start);
            std::ptr::copy_nonoverlapping(slot, to, range.len());
        }
    })
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
    let to = output.as_mut_ptr();
    let longest = ranges.iter().map(|r| r.len()).max().unwrap_or(0);
    if me == root {
        output.copy_from_slice(&input[ranges[me].clone()]);
    }
    let outgoing = if me == root { ranges.to_vec() } else { vec![0..0; ranges.len()] };
    if let Some(windows) = open(lane, input.as_ptr(), input.len())? {
        if me != root {
            // SAFETY: the root's input is only read until the meeting; the output is ours.
            unsafe {
                let from = windows[root].add(ranges[me].start);
                std::ptr::copy_nonoverlapping(from, to, ranges[me].len());
            }
        }
        return close(lane);
    }
    let from = Side { data: input.as_ptr(), ranges: outgoing };
    deal_each(lane, &from, longest, |peer, range, slot| {
        if peer == root {
            let range = range.start.min(ranges[me].len())..range.end.min(ranges[me].len());
            // SAFETY: a filled slot to our own output.
            unsafe { std::ptr::copy_nonoverlapping(slot, to.add(range.start), range.len()) };
        }
    })
}

/// Our `input` goes to everybody who wants it; what seat p brings comes to `places[p]` of `output`
/// where `wants(p)`. Our own is put there too.
pub(crate) fn all_gather(
    lane: &mut Lane,
    input: &[u8],
    output: *mut u8,
    places: &[Range<usize>],
    wants: impl Fn(usize) -> bool,
) -> Result<()> {
    let me = lane.stages.me;
    let own = output.wrapping_add(places[me].start);
    if wants(me) && own.cast_const() != input.as_ptr() {
        // SAFETY: the caller's output has our place; input and output are different buffers.
        unsafe { std::ptr::copy_nonoverlapping(input.as_ptr(), own, input.len()) };
    }
    if let Some(windows) = open(lane, input.as_ptr(), input.len())? {
        for peer in lane.stages.peers().filter(|p| wants(*p)) {
            // SAFETY: the peer's input is only read until the meeting; the output is ours.
            unsafe {
                let to = output.add(places[peer].start);
                std::ptr::copy_nonoverlapping(windows[peer], to, places[peer].len());
            }
        }
        return close(lane);
    }
    spread(lane, input, places, |peer, range, slot| {
        if wants(peer) {
            // SAFETY: a filled slot to our own output.
            unsafe {
                let to = output.add(places[peer].start + range.start);
                std::ptr::copy_nonoverlapping(slot, to, range.len());
            }
        }
    })
}

pub(crate) fn broadcast(lane: &mut Lane, bytes: &mut [u8], root: usize) -> Result<()> {
    let me = lane.stages.me;
    let data = bytes.as_mut_ptr();
    if let Some(windows) = open(lane, data, bytes.len())? {
        if me != root {
            // SAFETY: the root's buffer is only read until the meeting; ours is ours.
            unsafe { std::ptr::copy_nonoverlapping(windows[root], data, bytes.len()) };
        }
        return close(lane);
    }
    let mut lengths = vec![0..0; lane.stages.members()];
    lengths[root] = 0..bytes.len();
    let input: &[u8] = if me == root { bytes } else { &[] };
    spread(lane, input, &lengths, |_, range, slot| {
        // SAFETY: only the root's piece has a length; to our own buffer.
        unsafe { std::ptr::copy_nonoverlapping(slot, data.add(range.start), range.len()) };
    })
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
        if peer == stages.me {
            continue;
        }
        // SAFETY: a filled slot with as many words as ours.
        rows[peer] = unsafe { std::slice::from_raw_parts(slot, words.len()) }.to_vec();
    }
    stages.compare(watch)?;
    stages.drain(INPUTS, round);
    count(lane, 1, 0);
    Ok(rows)
}

fn count(lane: &mut Lane, rounds: usize, bytes: usize) {
    lane.traffic.messages += rounds as u64;
    lane.traffic.bytes += bytes as u64;
}

/// How ranges of different lengths are dealt out in rounds: each peer has a place in the slot.
struct Deal {
    rounds: usize,
    /// Bytes from one peer's place to the next, and the most a peer gets in one round.
    stride: usize,
}

impl Deal {
    fn over(ranges: &[Range<usize>], members: usize) -> Deal {
        Deal::of(ranges.iter().map(|r| r.len()).max().unwrap_or(0), members)
    }

    fn of(longest: usize, members: usize) -> Deal {
        let most = SLOT_BYTES / members / 64 * 64;
        let stride = piece_bytes(longest, most);
        Deal { rounds: longest.div_ceil(stride), stride }
    }

    fn piece(&self, range: &Range<usize>, round: usize) -> Range<usize> {
        let start = (range.start + round * self.stride).min(range.end);
        start..(start + self.stride).min(range.end)
    }
}

/// Bytes per round: enough rounds to overlap filling and draining, but none so small that the
/// meeting costs more than the bytes.
fn piece_bytes(longest: usize, most: usize) -> usize {
    (longest / 4).next_multiple_of(64).clamp(most.min(16 << 10), most)
}

struct Side {
    data: *const u8,
    /// What goes to each seat.
    ranges: Vec<Range<usize>>,
}

/// Deals out `from` in rounds; `consume` gets, for each round, the part of our own range it covers
/// and everybody's slot at our place.
fn deal(
    lane: &mut Lane,
    from: &Side,
    slices: &[Range<usize>],
    mut consume: impl FnMut(Range<usize>, &[*const u8]),
) -> Result<()> {
    let me = lane.stages.me;
    let plan = Deal::over(slices, lane.stages.members());
    let mine = 0..slices[me].len();
    deal_rounds(lane, from, &plan, |round, slots| consume(plan.piece(&mine, round), slots))
}

/// Deals out `from` in rounds; `consume` gets each peer's slot at our place.
fn deal_each(
    lane: &mut Lane,
    from: &Side,
    longest: usize,
    mut consume: impl FnMut(usize, Range<usize>, *const u8),
) -> Result<()> {
    let me = lane.stages.me;
    let plan = Deal::of(longest, lane.stages.members());
    deal_rounds(lane, from, &plan, |round, slots| {
        for (peer, slot) in slots.iter().enumerate().filter(|(p, _)| *p != me) {
            consume(peer, plan.piece(&(0..longest), round), *slot);
        }
    })
}

fn deal_rounds(
    lane: &mut Lane,
    from: &Side,
    plan: &Deal,
    mut consume: impl FnMut(usize, &[*const u8]),
) -> Result<()> {
    let mut moved = 0;
    let mut rounds = Vec::new();
    let members = lane.stages.members();
    for turn in 0..=plan.rounds {
        let (stages, watch) = lane.stages();
        if turn < plan.rounds {
            let round = stages.begin(INPUTS, watch)?;
            let slot = stages.own_slot(INPUTS, round);
            for peer in stages.peers() {
                let range = plan.piece(&from.ranges[peer], turn);
                // SAFETY: our own buffer to the peer's place in our own slot.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        from.data.add(range.start),
                        slot.add(peer * plan.stride),
                        range.len(),
                    );
                }
                moved += range.len();
            }
            stages.fill(INPUTS, round);
            rounds.push(round);
        }
        if turn >= 1 {
            let round = rounds[turn - 1];
            let mut slots = vec![std::ptr::null(); members];
            for peer in stages.peers() {
                let slot = stages.slot_of(peer, INPUTS, round, watch)?;
                slots[peer] = slot.wrapping_add(stages.me * plan.stride);
            }
            consume(turn - 1, &slots);
            stages.drain(INPUTS, round);
        }
    }
    count(lane, plan.rounds, moved);
    Ok(())
}

/// Passes our `input` on to everybody in rounds; `consume` gets each piece of each peer's, as long as
/// `lengths` says.
fn spread(
    lane: &mut Lane,
    input: &[u8],
    lengths: &[Range<usize>],
    mut consume: impl FnMut(usize, Range<usize>, *const u8),
) -> Result<()> {
    let longest = lengths.iter().map(|r| r.len()).max().unwrap_or(0);
    let piece = piece_bytes(longest, SLOT_BYTES);
    let turns = longest.div_ceil(piece);
    let part = |len: usize, turn: usize| (turn * piece).min(len)..((turn + 1) * piece).min(len);
    let mut rounds = Vec::new();
    for turn in 0..=turns {
        let (stages, watch) = lane.stages();
        if turn < turns {
            let round = stages.begin(INPUTS, watch)?;
            let own = &input[part(input.len(), turn)];
            // SAFETY: to our own slot, which is at least a piece long.
            unsafe {
                let slot = stages.own_slot(INPUTS, round);
                std::ptr::copy_nonoverlapping(own.as_ptr(), slot, own.len());
            }
            stages.fill(INPUTS, round);
            rounds.push(round);
        }
        if turn >= 1 {
            let round = rounds[turn - 1];
            for peer in stages.peers() {
                let range = part(lengths[peer].len(), turn - 1);
                if !range.is_empty() {
                    consume(peer, range, stages.slot_of(peer, INPUTS, round, watch)?);
                }
            }
            stages.drain(INPUTS, round);
        }
    }
    count(lane, turns, input.len());
    Ok(())
}
