//! Double binary tree: two trees over the same members, each reducing half of the buffer to its root and
//! broadcasting it, pipelined in pieces. An inner node of one tree is a leaf of the other, so all members
//! have equal load (Sanders, Speck, Träff: Two-tree algorithms for full bandwidth broadcast, 2009).
//! Full bandwidth at logarithmic depth: for sizes between those of halving and ring.
//!
//! - all-reduce: in each tree a member sends S/2 bytes to its parent and to each of its children,
//!   about 2S in total; depth 2⌈log₂ P⌉.
//! - broadcast, reduce: one tree from the root, S bytes to each child or to the parent.

use super::Team;
use crate::call::error::Result;
use crate::call::fold::Fold;
use crate::call::partition::Partition;
use crate::call::traffic::Traffic;
use crate::memory::scratch::Scratch;
use std::ops::Range;

/// Bytes that are sent as one message.
const PIECE: usize = 64 << 10;

/// A member's neighbours in a tree, as indices in the team.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Node {
    parent: Option<usize>,
    children: Vec<usize>,
}

/// In-order binary tree over 0..n: the lowest set bit of an index is its height, odd indices are leaves,
/// and 0 is the root with a single child.
fn in_order(place: usize, n: usize) -> Node {
    if place == 0 {
        let child = n.next_power_of_two() / 2;
        return Node { parent: None, children: if n > 1 { vec![child] } else { vec![] } };
    }
    let height = 1 << place.trailing_zeros();
    let up = (place ^ height) | (height << 1);
    let parent = if up < n { up } else { place ^ height };
    let mut children = Vec::new();
    if height > 1 {
        children.push(place - height / 2);
        // The right subtree may be truncated at n; its root is then the highest existing member.
        let mut step = height / 2;
        while step > 0 && place + step >= n {
            step /= 2;
        }
        if step > 0 {
            children.push(place + step);
        }
    }
    Node { parent: Some(parent), children }
}

/// Our node in one of the two trees. The second tree is the first one mirrored, or shifted if n is odd,
/// which turns leaves into inner nodes.
fn node(tree: usize, me: usize, n: usize) -> Node {
    if tree == 0 {
        return in_order(me, n);
    }
    let swap = |x: usize| if n.is_multiple_of(2) { n - 1 - x } else { (x + n - 1) % n };
    let back = |x: usize| if n.is_multiple_of(2) { n - 1 - x } else { (x + 1) % n };
    let there = in_order(swap(me), n);
    Node {
        parent: there.parent.map(back),
        children: there.children.into_iter().map(back).collect(),
    }
}

/// The first tree, rotated so that `root` is its root.
fn rooted(root: usize, me: usize, n: usize) -> Node {
    let there = in_order((me + n - root) % n, n);
    let back = |x: usize| (x + root) % n;
    Node {
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

/// All members take the same turns in the same order, so the receiver of a blocked message always
/// reaches its receive: there is no deadlock.
pub(crate) fn all_reduce(team: &mut Team, bytes: &mut [u8], fold: &Fold) -> Result<()> {
    let n = team.size();
    let halves = Partition::of_bytes(bytes.len(), 2, fold.dtype.bytes());
    let nodes = [node(0, team.me, n), node(1, team.me, n)];
    let turns = pieces(halves.largest());
    // A piece is broadcast this many turns after it was reduced, so that both directions stay busy.
    let lag = 2 * n.next_power_of_two().ilog2() as usize;
    for turn in 0..turns + lag {
        for (tree, node) in nodes.iter().enumerate() {
            if turn < turns {
                let range = piece(&halves.bytes(tree), turn);
                reduce_piece(team, node, &mut bytes[range], fold)?;
            }
            if turn >= lag {
                let range = piece(&halves.bytes(tree), turn - lag);
                broadcast_piece(team, node, &mut bytes[range])?;
            }
        }
    }
    Ok(())
}

/// Folds the children's contributions into `acc` and sends it to the parent.
fn reduce_piece(team: &mut Team, node: &Node, acc: &mut [u8], fold: &Fold) -> Result<()> {
    for child in &node.children {
        team.step_folding(None, *child, acc, fold)?;
    }
    match node.parent {
        Some(parent) => team.send(parent, acc),
        None => {
            fold.finish(acc);
            Ok(())
        }
    }
}

fn broadcast_piece(team: &mut Team, node: &Node, bytes: &mut [u8]) -> Result<()> {
    if let Some(parent) = node.parent {
        team.receive(parent, bytes)?;
    }
    for child in &node.children {
        team.send(*child, bytes)?;
    }
    Ok(())
}

pub(crate) fn broadcast(team: &mut Team, bytes: &mut [u8], root: usize) -> Result<()> {
    let node = rooted(root, team.me, team.size());
    let whole = 0..bytes.len();
    for i in 0..pieces(bytes.len()) {
        broadcast_piece(team, &node, &mut bytes[piece(&whole, i)])?;
    }
    Ok(())
}

/// Reduces into the root's buffer; the others are unchanged.
pub(crate) fn reduce(team: &mut Team, bytes: &mut [u8], fold: &Fold, root: usize) -> Result<()> {
    let node = rooted(root, team.me, team.size());
    let whole = 0..bytes.len();
    for i in 0..pieces(bytes.len()) {
        let range = piece(&whole, i);
        if node.parent.is_none() {
            reduce_piece(team, &node, &mut bytes[range], fold)?;
        } else {
            reduce_piece(team, &node, &mut Scratch::copy_of(&bytes[range]), fold)?;
        }
    }
    Ok(())
}

pub(crate) fn all_reduce_sent(count: usize, width: usize, me: usize, n: usize) -> Traffic {
    let halves = Partition { count, parts: 2, width };
    let turns = pieces(halves.largest()) as u64;
    let per_tree = (0..2).map(|tree| {
        let node = node(tree, me, n);
        let edges = u64::from(node.parent.is_some()) + node.children.len() as u64;
        Traffic { messages: edges * turns, bytes: edges * halves.bytes(tree).len() as u64 }
    });
    per_tree.sum()
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
    fn both_trees_are_consistent_and_of_logarithmic_depth() {
        for n in 1..=64 {
            for tree in 0..2 {
                let nodes: Vec<Node> = (0..n).map(|me| node(tree, me, n)).collect();
                assert_eq!(nodes.iter().filter(|k| k.parent.is_none()).count(), 1);
                for (me, k) in nodes.iter().enumerate() {
                    assert!(
                        k.parent.is_none_or(|p| nodes[p].children.contains(&me)),
                        "{me} of {n}"
                    );
                    assert!(k.children.iter().all(|c| nodes[*c].parent == Some(me)), "{me} of {n}");
                    let depth = std::iter::successors(Some(me), |m| nodes[*m].parent).take(n + 1);
                    assert!(depth.count() <= n.next_power_of_two().ilog2() as usize + 2);
                }
            }
        }
    }

    #[test]
    fn at_most_one_member_has_children_in_both_trees() {
        for n in 2..=64 {
            let inner = |tree, me| !node(tree, me, n).children.is_empty();
            let both = (0..n).filter(|&me| inner(0, me) && inner(1, me)).count();
            assert!(both <= n % 2, "{both} of {n}");
        }
    }
}
