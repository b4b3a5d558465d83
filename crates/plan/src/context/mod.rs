//! The context axis: which positions of every sequence a rank holds, and which degrees fit a model.
//!
//! A rank of a context of u · r sits at `index = ring * u + ulysses`: the ulysses coordinate is the inner one,
//! so that its all-to-all, behind which no computing hides, runs between the closest ranks.

mod sent;

pub use sent::{Brought, Sent, ring_sent, sent, ulysses_sent};

use crate::resolve::near;
use serde::{Deserialize, Serialize};

/// How attention reaches what other ranks of the context hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContextKind {
    /// Keys and values travel round a ring (Liu et al. 2023). Any number of ranks.
    Ring,
    /// Heads are dealt out for the time of the attention (Jacobs et al. 2023). As many ranks as divide the heads.
    Ulysses,
    /// Heads are dealt out among neighbours, keys travel between such groups (USP: Fang & Zhao 2024).
    Both,
}

/// Positions `start..start + len` of every sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Run {
    pub start: usize,
    pub len: usize,
}

impl Run {
    /// One more than its last position.
    pub fn end(&self) -> usize {
        self.start + self.len
    }

    /// Positions that both have.
    fn overlap(&self, other: Run) -> Option<Run> {
        let (start, end) = (self.start.max(other.start), self.end().min(other.end()));
        (start < end).then(|| Run { start, len: end - start })
    }
}

/// The degrees (ulysses u, ring r) of a context of u · r ranks. `Both` takes the largest u that the heads
/// allow, and leaves at least two to the ring where it can: what a rank sends for ulysses falls with the number
/// of ranks, for a ring it does not. Heads are those of a rank, after the tensor axis has cut them.
///
/// ```
/// use lockstep_plan::context::{ContextKind::*, degrees};
///
/// assert_eq!(degrees(Ring, 8, 4, 4), (1, 8));
/// assert_eq!(degrees(Ulysses, 4, 4, 4), (4, 1));
/// assert_eq!(degrees(Both, 8, 4, 4), (4, 2));
/// assert_eq!(degrees(Both, 4, 4, 4), (2, 2));
/// ```
pub fn degrees(kind: ContextKind, context: usize, heads: usize, kv_heads: usize) -> (usize, usize) {
    match kind {
        ContextKind::Ring => (1, context),
        ContextKind::Ulysses => (context, 1),
        ContextKind::Both => {
            // More ranks than heads cannot have one each.
            let most = (context / 2).min(heads).max(1);
            let fits = |u: &usize| context.is_multiple_of(*u) && deals(*u, heads, kv_heads);
            let u = (1..=most).rev().find(fits).unwrap_or(1);
            (u, context / u)
        }
    }
}

/// The runs of the rank at `index`, in the order in which it holds them. All ranks hold equally many positions.
///
/// A ring cuts the sequence in 2r chunks and gives its rank i the chunks i and 2r-1-i: later queries see more
/// keys, and so everybody gets as much to do. Ulysses cuts what its ring rank holds in u pieces.
///
/// ```
/// use lockstep_plan::context::{ContextKind, Run, runs};
///
/// let held = |index| runs(ContextKind::Ring, 16, (1, 2), index);
/// assert_eq!(held(0), [Run { start: 0, len: 4 }, Run { start: 12, len: 4 }]);
/// assert_eq!(held(1), [Run { start: 4, len: 8 }]);
/// ```
///
/// # Panics
/// When `seq` is no [`multiple`] of what the degrees ask for, or there is no such rank.
pub fn runs(
    kind: ContextKind,
    seq: usize,
    (ulysses, ring): (usize, usize),
    index: usize,
) -> Vec<Run> {
    assert!(index < ulysses * ring, "rank {index} of a context of {ulysses} · {ring}");
    let step = multiple((ulysses, ring));
    assert!(seq.is_multiple_of(step), "seq={seq} is no multiple of {step} ({kind:?})");
    let share = share(seq, ring, index / ulysses);
    let piece = seq / ring / ulysses;
    cut(&share, Run { start: index % ulysses * piece, len: piece })
}

/// What the sequence must be a multiple of for all ranks to hold equally much: 2r for a ring, u for ulysses.
pub fn multiple((ulysses, ring): (usize, usize)) -> usize {
    match (ulysses.is_multiple_of(2), ring) {
        (_, 1) => ulysses,
        (true, _) => ring * ulysses,
        (false, _) => 2 * ring * ulysses,
    }
}

/// What a rank of the ring holds, together with its ulysses neighbours. Chunks that touch are one run.
pub fn share(seq: usize, ring: usize, rank: usize) -> Vec<Run> {
    let chunk = seq / (2 * ring);
    let (early, late) = (rank * chunk, (2 * ring - 1 - rank) * chunk);
    if ring == 1 {
        return vec![Run { start: 0, len: seq }];
    }
    if early + chunk == late {
        return vec![Run { start: early, len: 2 * chunk }];
    }
    vec![Run { start: early, len: chunk }, Run { start: late, len: chunk }]
}

/// Of runs laid end to end, the positions with these numbers.
fn cut(runs: &[Run], numbers: Run) -> Vec<Run> {
    let mut before = 0;
    let piece = |run: &Run| {
        let first = before;
        before += run.len;
        let part = Run { start: first, len: run.len }.overlap(numbers)?;
        Some(Run { start: run.start + part.start - first, len: part.len })
    };
    runs.iter().filter_map(piece).collect()
}

/// Whether a context of so many ranks fits the sequence and the heads; if not, why, and what would. Heads are
/// those of a rank, after the tensor axis has cut them.
pub fn check(
    kind: ContextKind,
    context: usize,
    seq: usize,
    heads: usize,
    kv_heads: usize,
) -> Result<(), String> {
    if context == 0 {
        return Err("context=0: there is at least one rank; try 1".into());
    }
    let (ulysses, ring) = degrees(kind, context, heads, kv_heads);
    if !deals(ulysses, heads, kv_heads) {
        return Err(heads_do_not_deal(ulysses, heads, kv_heads));
    }
    let step = multiple((ulysses, ring));
    if !seq.is_multiple_of(step) {
        let near = near::multiples(seq, step);
        let why = match (ulysses, ring) {
            (_, 1) => format!("ulysses cuts it in {ulysses}"),
            (1, _) => format!("a ring of {ring} cuts it in {step}"),
            _ => format!("ulysses={ulysses} in a ring of {ring} cuts it in {step}"),
        };
        return Err(format!("seq={seq} is no multiple of {step}: {why}; try {near}"));
    }
    Ok(())
}

/// Whether heads can be dealt out to so many ranks: as many query heads to each, and of keys either as many to
/// each, or each to as many ranks.
fn deals(ulysses: usize, heads: usize, kv_heads: usize) -> bool {
    heads.is_multiple_of(ulysses)
        && (kv_heads.is_multiple_of(ulysses) || ulysses.is_multiple_of(kv_heads))
}

fn heads_do_not_deal(ulysses: usize, heads: usize, kv_heads: usize) -> String {
    let fits = |u: &usize| deals(*u, heads, kv_heads);
    let below = (1..ulysses.min(heads + 1)).rev().find(fits);
    let above = (ulysses + 1..=heads).find(fits);
    let near = near::either(below, above);
    let why = match heads.is_multiple_of(ulysses) {
        false => format!("heads={heads}"),
        true => format!("kv_heads={kv_heads}, and is no multiple of it"),
    };
    format!("context={ulysses} does not divide {why}, which ulysses deals out; try {near}, or ring")
}
