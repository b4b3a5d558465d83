//! Double binary tree: two trees over the same members, each carrying half of the buffer in pieces,
//! up to its root and down again. A member that has children in one tree is a leaf in the other, so
//! all work alike (Sanders, Speck, Träff: Two-tree algorithms for full bandwidth broadcast, 2009).
//! Full bandwidth at logarithmic depth: for the sizes between halving and ring.
//!
//! - all-reduce: in each tree a member sends S/2 bytes to its parent and to each of its children,
//!   about 2S in all; 2⌈log₂ P⌉ hops deep, pieces following each other.
//! - broadcast, reduce: one tree from the root, S bytes to each child or to the parent.

use super::Team;
use crate::call::cost::Traffic;
use crate::call::cut::Cut;
use crate::call::error::Result;
use crate::call::fold::Fold;
use crate::group::lane::Lane;
use crate::link::Inbox;
use crate::memory::scratch::Scratch;
use std::ops::Range;

/// Bytes of a tree that travel as one message.
pub(crate) const PIECE: usize = 64 << 10;

/// A member's place in a tree; members are places in the team.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Knot {
    pub parent: Option<usize>,
    pub children: Vec<usize>,
}

/// The in-order binary tree over 0..n: the lowest set bit of a number is its height, odd numbers are
/// the leaves, and 0 is the root with a single child.
fn in_order(place: usize, n: usize) -> Knot {
    if place == 0 {
        let child = n.next_power_of_two() / 2;
        return Knot { parent: None, children: if n > 1 { vec![child] } else { vec![] } };
    }
    let height = 1 << place.trailing_zeros();
    let up = (place ^ height) | (height << 1);
    let parent = if up < n { up } else { place ^ height };
    let mut children = Vec::new();
    if height > 1 {
        children.push(place - height / 2);
        // The right subtree may be cut off at n: then its highest member that exists.
        let mut step = height / 2;
        while step > 0 && place + step >= n {
            step /= 2;
        }
        if step > 0 {
            children.push(place + step);
        }
    }
    Knot { parent: Some(parent), children }
}

/// Our place in one of the two trees: the second is the first mirrored, or shifted if n is odd,
/// which turns leaves into inner members.
pub(crate) fn knot(tree: usize, me: usize, n: usize) -> Knot {
    if tree == 0 {
        return in_order(me, n);
    }
    let swap = |x: usize| if n.is_multiple_of(2) { n - 1 - x } else { (x + n - 1) % n };
    let back = |x: usize| if n.is_multiple_of(2) { n - 1 - x } else { (x + 1) % n };
    let there = in_order(swap(me), n);
    Knot {
        parent: there.parent.map(back),
        children: there.children.into_iter().map(back).collect(),
    }
}

/// The first tree turned so that `root` is its root.
fn rooted(root: usize, me: usize, n: usize) -> Knot {
    let there = in_order((me + n - root) % n, n);
    let back = |x: usize| (x + root) % n;
    Knot {
        parent: there.parent.map(back),
        children: there.children.into_iter().map(back).collect(),
    }
}

/// Piece `i` of `range`, empty past its end.
fn piece(range: &Range<usize>, i: usize) -> Range<usize> {
    let start = (range.start + i * PIECE).min(range.end);
    start..(start + PIECE).min(range.end)
}

fn pieces(bytes: usize) -> usize {
    bytes.div_ceil(PIECE).max(1)
}

/// All members walk through the same turns in the same order, so a message that cannot be sent yet
/// is always waited for by somebody who is on his way to it: nobody waits in a circle.
pub(crate) fn all_reduce(
    lane: &mut Lane,
    team: &Team,
    bytes: &mut [u8],
    fold: &Fold,
) -> Result<()> {
    let n = team.size();
    let width = fold.dtype.bytes();
    let halves = Cut { count: bytes.len() / width, parts: 2, width };
    let knots = [knot(0, team.me, n), knot(1, team.me, n)];
    let turns = pieces(halves.largest());
    // A piece comes down this many turns after it went up, so that both directions stay busy.
    let lag = 2 * n.next_power_of_two().ilog2() as usize;
    for turn in 0..turns + lag {
        for (tree, knot) in knots.iter().enumerate() {
            if turn < turns {
                let range = piece(&halves.bytes(tree), turn);
                up(lane, team, knot, &mut bytes[range.clone()], fold)?;
            }
            if turn >= lag {
                let range = piece(&halves.bytes(tree), turn - lag);
                down(lane, team, knot, &mut bytes[range])?;
            }
        }
    }
    Ok(())
}

/// Folds what the children send into `acc` and passes it on to the parent.
fn up(lane: &mut Lane, team: &Team, knot: &Knot, acc: &mut [u8], fold: &Fold) -> Result<()> {
    let len = acc.len();
    for child in &knot.children {
        let mut take =
            |at: usize, piece: &[u8]| fold.fold_into(&mut acc[at..at + piece.len()], piece);
        lane.step(None, Some((team.members[*child], Inbox::Each { len, take: &mut take })))?;
    }
    match knot.parent {
        Some(parent) => lane.send(team.members[parent], acc),
        None => {
            fold.finish(acc);
            Ok(())
        }
    }
}

fn down(lane: &mut Lane, team: &Team, knot: &Knot, bytes: &mut [u8]) -> Result<()> {
    if let Some(parent) = knot.parent {
        lane.receive(team.members[parent], bytes)?;
    }
    for child in &knot.children {
        lane.send(team.members[*child], bytes)?;
    }
    Ok(())
}

pub(crate) fn broadcast(lane: &mut Lane, team: &Team, bytes: &mut [u8], root: usize) -> Result<()> {
    let knot = rooted(root, team.me, team.size());
    let whole = 0..bytes.len();
    for i in 0..pieces(bytes.len()) {
        down(lane, team, &knot, &mut bytes[piece(&whole, i)])?;
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
    let knot = rooted(root, team.me, team.size());
    let whole = 0..bytes.len();
    for i in 0..pieces(bytes.len()) {
        let range = piece(&whole, i);
        if knot.parent.is_none() {
            up(lane, team, &knot, &mut bytes[range], fold)?;
        } else {
            up(lane, team, &knot, &mut Scratch::copy_of(&bytes[range]), fold)?;
        }
    }
    Ok(())
}

pub(crate) fn all_reduce_sent(count: usize, width: usize, me: usize, n: usize) -> Traffic {
    let halves = Cut { count, parts: 2, width };
    let turns = pieces(halves.largest()) as u64;
    let per_tree = (0..2).map(|tree| {
        let knot = knot(tree, me, n);
        let edges = u64::from(knot.parent.is_some()) + knot.children.len() as u64;
        Traffic { messages: edges * turns, bytes: edges * halves.bytes(tree).len() as u64 }
    });
    per_tree.fold(Traffic::default(), |a, b| a + b)
}

pub(crate) fn broadcast_sent(bytes: usize, root: usize, me: usize, n: usize) -> Traffic {
    let children = rooted(root, me, n).children.len() as u64;
    Traffic { messages: children * pieces(bytes) as u64, bytes: children * bytes as u64 }
}

pub(crate) fn reduce_sent(bytes: usize, root: usize, me: usize) -> Traffic {
    let parents = u64::from(me != root);
    Traffic { messages: parents * pieces(bytes) as u64, bytes: parents * bytes as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_are_trees_and_parents_know_their_children() {
        for n in 1..=64 {
            for tree in 0..2 {
                let knots: Vec<Knot> = (0..n).map(|me| knot(tree, me, n)).collect();
                assert_eq!(knots.iter().filter(|k| k.parent.is_none()).count(), 1);
                for (me, k) in knots.iter().enumerate() {
                    assert!(
                        k.parent.is_none_or(|p| knots[p].children.contains(&me)),
                        "{me} of {n}"
                    );
                    assert!(k.children.iter().all(|c| knots[*c].parent == Some(me)), "{me} of {n}");
                    let depth = std::iter::successors(Some(me), |m| knots[*m].parent).take(n + 1);
                    assert!(depth.count() <= n.next_power_of_two().ilog2() as usize + 2);
                }
            }
        }
    }

    #[test]
    fn hardly_anybody_has_children_in_both() {
        for n in 2..=64 {
            let inner = |tree, me| !knot(tree, me, n).children.is_empty();
            let both = (0..n).filter(|&me| inner(0, me) && inner(1, me)).count();
            assert!(both <= n % 2, "{both} of {n}");
        }
    }
}
