//! Recursive halving and doubling: the members split into two halves, exchange the parts that the other
//! half will own, and continue within their half. Sends the minimum number of bytes in the fewest steps,
//! for any number of members. Distant members communicate too, so all links should be equally fast.
//!
//! With P members and S bytes: reduce-scatter and all-gather take ⌈log₂ P⌉ levels and, for P a power
//! of two, (P-1)/P · S bytes per member. When P is odd at some level, the larger half has a member
//! without a partner; it sends its contribution to the last member of the smaller half, and receives its
//! data from there in the doubling phase. All-reduce is a reduce-scatter followed by an all-gather.

use super::Team;
use crate::call::error::Result;
use crate::call::fold::Fold;
use crate::call::partition::{Partition, split_disjoint};
use crate::call::traffic::Traffic;
use crate::link::Inbox;
use std::ops::Range;

/// One level of the halving from one member's view; members and parts are indices in the team.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Level {
    /// Parts that our half keeps.
    keep: Range<usize>,
    /// Parts that the other half keeps.
    give: Range<usize>,
    /// Receiver of the parts that we give.
    to: usize,
    /// Senders of the parts that we keep: nobody, our partner, or also the member without a partner.
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
            let unpaired = partner >= high;
            Level {
                keep: first.clone(),
                give: second.clone(),
                to: if unpaired { high - 1 } else { partner },
                from: if unpaired { vec![] } else { vec![partner] },
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

pub(crate) fn all_reduce(team: &mut Team, bytes: &mut [u8], fold: &Fold) -> Result<()> {
    let partition = Partition::of_bytes(bytes.len(), team.size(), fold.dtype.bytes());
    reduce_scatter_in_place(team, bytes, &partition, fold)?;
    all_gather(team, bytes, &partition)
}

/// Afterwards our part of `bytes` holds the result, and the other parts are undefined.
pub(crate) fn reduce_scatter_in_place(
    team: &mut Team,
    bytes: &mut [u8],
    partition: &Partition,
    fold: &Fold,
) -> Result<()> {
    for level in levels(team.me, team.size()) {
        let (out, acc) =
            split_disjoint(bytes, partition.span(level.give), partition.span(level.keep));
        let mut out = Some((level.to, out));
        for from in level.from {
            team.step_folding(out.take(), from, acc, fold)?;
        }
        // A member without a partner receives nothing.
        if let Some((to, out)) = out {
            team.send(to, out)?;
        }
    }
    fold.finish(&mut bytes[partition.bytes(team.me)]);
    Ok(())
}

/// Receives every part of `bytes` from its owner: the halving in reverse.
pub(crate) fn all_gather(team: &mut Team, bytes: &mut [u8], partition: &Partition) -> Result<()> {
    for level in levels(team.me, team.size()).into_iter().rev() {
        let (out, into) =
            split_disjoint(bytes, partition.span(level.keep), partition.span(level.give));
        let mut inbox = Some((level.to, Inbox::Into(into)));
        for to in level.from {
            team.step(Some((to, out)), inbox.take())?;
        }
        if let Some(inbox) = inbox {
            team.step(None, Some(inbox))?;
        }
    }
    Ok(())
}

/// Dissemination barrier: ⌈log₂ P⌉ empty messages per member; after round k every member depends on
/// 2^k others.
pub(crate) fn barrier(team: &mut Team) -> Result<()> {
    let mut distance = 1;
    while distance < team.size() {
        let (to, from) = (team.after(distance), team.before(distance));
        team.step(Some((to, &[])), Some((from, Inbox::Into(&mut []))))?;
        distance *= 2;
    }
    Ok(())
}

pub(crate) fn reduce_scatter_sent(partition: &Partition, me: usize) -> Traffic {
    let levels = levels(me, partition.parts);
    let bytes = levels.iter().map(|l| partition.span(l.give.clone()).len() as u64).sum();
    Traffic { messages: levels.len() as u64, bytes }
}

pub(crate) fn all_gather_sent(partition: &Partition, me: usize) -> Traffic {
    let sent = levels(me, partition.parts).into_iter().map(|l| {
        let receivers = l.from.len() as u64;
        Traffic { messages: receivers, bytes: receivers * partition.span(l.keep).len() as u64 }
    });
    sent.sum()
}

pub(crate) fn barrier_sent(members: usize) -> Traffic {
    Traffic { messages: u64::from(members.next_power_of_two().ilog2()), bytes: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn senders_and_receivers_match() {
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
    fn powers_of_two_send_the_minimum() {
        for log in 0..6u32 {
            let p = 1 << log;
            let partition = Partition { count: 64 * p, parts: p, width: 4 };
            for me in 0..p {
                let sent = reduce_scatter_sent(&partition, me);
                assert_eq!(sent.messages, u64::from(log));
                assert_eq!(sent.bytes, (256 * (p - 1)) as u64);
                assert_eq!(all_gather_sent(&partition, me), sent);
            }
        }
    }
}
