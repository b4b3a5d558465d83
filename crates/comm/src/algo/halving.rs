//! Recursive halving and doubling: the members split in two halves, swap what the other half will
//! own, and go on inside their half. The least bytes in the fewest steps, for any number of members;
//! far peers talk too, so it wants links of equal reach.
//!
//! With P members and S bytes: reduce-scatter and all-gather take ⌈log₂ P⌉ levels and, for P a power
//! of two, (P-1)/P · S bytes per member. When P is odd at some level, the larger half has a member
//! without a partner; it sends its share to the last member of the smaller half, and in the doubling
//! gets its data from there. All-reduce is one after the other.

use super::Team;
use crate::call::cost::Traffic;
use crate::call::cut::Cut;
use crate::call::error::Result;
use crate::call::fold::Fold;
use crate::group::lane::Lane;
use crate::link::Inbox;
use std::ops::Range;

/// One level of the halving as one member sees it; members and parts are places in the team.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Level {
    /// Parts that our half goes on with.
    keep: Range<usize>,
    /// Parts that the other half goes on with.
    give: Range<usize>,
    /// Who gets what we give.
    to: usize,
    /// Who gives us of what we keep: nobody, our partner, or the member without one as well.
    from: Vec<usize>,
}

fn levels(me: usize, members: usize) -> Vec<Level> {
    let (mut low, mut high) = (0, members);
    let mut levels = Vec::new();
    while high - low > 1 {
        let middle = low + (high - low).div_ceil(2);
        let (first, second) = (low..middle, middle..high);
        let odd = first.len() > second.len();
        let level = if first.contains(&me) {
            let partner = middle + (me - low);
            let alone = partner >= high;
            Level {
                keep: first.clone(),
                give: second.clone(),
                to: if alone { high - 1 } else { partner },
                from: if alone { vec![] } else { vec![partner] },
            }
        } else {
            let partner = low + (me - middle);
            let mut from = vec![partner];
            if odd && me == high - 1 {
                from.push(middle - 1);
            }
            Level { keep: second.clone(), give: first.clone(), to: partner, from }
        };
        (low, high) = (level.keep.start, level.keep.end);
        levels.push(level);
    }
    levels
}

pub(crate) fn all_reduce(
    lane: &mut Lane,
    team: &Team,
    bytes: &mut [u8],
    fold: &Fold,
) -> Result<()> {
    let width = fold.dtype.bytes();
    let cut = Cut { count: bytes.len() / width, parts: team.size(), width };
    reduce_scatter_in_place(lane, team, bytes, &cut, fold)?;
    all_gather(lane, team, bytes, &cut)
}

/// After this, our part of `bytes` is the finished one; the other parts are used up.
pub(crate) fn reduce_scatter_in_place(
    lane: &mut Lane,
    team: &Team,
    bytes: &mut [u8],
    cut: &Cut,
    fold: &Fold,
) -> Result<()> {
    for level in levels(team.me, team.size()) {
        let (out, acc) = crate::call::cut::apart(bytes, cut.span(level.give), cut.span(level.keep));
        let mut out = Some((team.members[level.to], out));
        let len = acc.len();
        for from in &level.from {
            let mut take =
                |at: usize, piece: &[u8]| fold.fold_into(&mut acc[at..at + piece.len()], piece);
            let inbox = Inbox::Each { len, take: &mut take };
            lane.step(out.take(), Some((team.members[*from], inbox)))?;
        }
        // Without a partner there was nothing to receive.
        if let Some((to, out)) = out {
            lane.send(to, out)?;
        }
    }
    fold.finish(&mut bytes[cut.bytes(team.me)]);
    Ok(())
}

/// Every part of `bytes` comes from the member that owns it: the halving backwards.
pub(crate) fn all_gather(lane: &mut Lane, team: &Team, bytes: &mut [u8], cut: &Cut) -> Result<()> {
    for level in levels(team.me, team.size()).into_iter().rev() {
        let (out, into) =
            crate::call::cut::apart(bytes, cut.span(level.keep), cut.span(level.give));
        let mut inbox = Some((team.members[level.to], Inbox::Into(into)));
        for to in &level.from {
            lane.step(Some((team.members[*to], out)), inbox.take())?;
        }
        if let Some(inbox) = inbox {
            lane.step(None, Some(inbox))?;
        }
    }
    Ok(())
}

/// ⌈log₂ P⌉ empty messages each: after round k everybody has heard of 2^k members.
pub(crate) fn barrier(lane: &mut Lane, team: &Team) -> Result<()> {
    let mut reach = 1;
    while reach < team.size() {
        lane.step(
            Some((team.after(reach), &[])),
            Some((team.before(reach), Inbox::Into(&mut []))),
        )?;
        reach *= 2;
    }
    Ok(())
}

pub(crate) fn reduce_scatter_sent(cut: &Cut, me: usize) -> Traffic {
    let levels = levels(me, cut.parts);
    let bytes = levels.iter().map(|l| cut.span(l.give.clone()).len() as u64).sum();
    Traffic { messages: levels.len() as u64, bytes }
}

pub(crate) fn all_gather_sent(cut: &Cut, me: usize) -> Traffic {
    let sent = levels(me, cut.parts).into_iter().map(|l| {
        let receivers = l.from.len() as u64;
        Traffic { messages: receivers, bytes: receivers * cut.span(l.keep).len() as u64 }
    });
    sent.fold(Traffic::default(), |a, b| a + b)
}

pub(crate) fn barrier_sent(members: usize) -> Traffic {
    Traffic { messages: u64::from(members.next_power_of_two().ilog2()), bytes: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_sends_is_who_is_heard() {
        for n in 1..=64 {
            let all: Vec<Vec<Level>> = (0..n).map(|me| levels(me, n)).collect();
            for (me, mine) in all.iter().enumerate() {
                assert_eq!(mine.last().map_or(me..me + 1, |l| l.keep.clone()), me..me + 1);
                for (depth, level) in mine.iter().enumerate() {
                    assert!(all[level.to][depth].from.contains(&me), "{me} of {n}, level {depth}");
                    assert_eq!(all[level.to][depth].keep, level.give);
                }
            }
        }
    }

    #[test]
    fn powers_of_two_send_the_least_bytes_in_the_fewest_steps() {
        for log in 0..6u32 {
            let p = 1 << log;
            let cut = Cut { count: 64 * p, parts: p, width: 4 };
            for me in 0..p {
                let sent = reduce_scatter_sent(&cut, me);
                assert_eq!(sent.messages, u64::from(log));
                assert_eq!(sent.bytes, (256 * (p - 1)) as u64);
                assert_eq!(all_gather_sent(&cut, me), sent);
            }
        }
    }
}
