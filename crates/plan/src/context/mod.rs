//! The context axis: which positions of every sequence a rank holds, and which degrees a model allows.
//!
//! With Ulysses degree u and ring degree r, a rank has `index = ring * u + ulysses`. Ulysses is the inner coordinate:
//! its all-to-all cannot be overlapped with compute, so it runs between the closest ranks.

mod sent;

pub use sent::{AttentionShard, Sent, ring_sent, sent, ulysses_sent};

use crate::resolve::near;
use serde::{Deserialize, Serialize};

/// Algorithm of context parallel attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContextKind {
    /// Ring attention: keys and values circulate in a ring (Liu et al. 2023). Any number of ranks.
    Ring,
    /// An all-to-all distributes heads during attention (Jacobs et al. 2023). The ranks must divide the heads.
    Ulysses,
    /// Ulysses among neighbours, a ring between these groups (USP: Fang & Zhao 2024).
    Both,
}

/// Positions `start..start + len` of every sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Run {
    pub start: usize,
    pub len: usize,
}

impl Run {
    /// End of the half-open range.
    pub fn end(&self) -> usize {
        self.start + self.len
    }

    /// Intersection of two runs.
    fn overlap(&self, other: Run) -> Option<Run> {
        let (start, end) = (self.start.max(other.start), self.end().min(other.end()));
        (start < end).then(|| Run { start, len: end - start })
    }
}

/// Ulysses and ring degrees (u, r) of a context of u · r ranks. `Both` takes the largest u that the heads allow and
/// leaves at least two ranks to the ring if possible: the traffic of Ulysses falls with the number of ranks, that of
/// a ring does not. Heads are counted per tensor rank.
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
            // Every rank needs at least one head.
            let most = (context / 2).min(heads).max(1);
            let fits = |u: &usize| context.is_multiple_of(*u) && divides_heads(*u, heads, kv_heads);
            let u = (1..=most).rev().find(fits).unwrap_or(1);
            (u, context / u)
        }
    }
}

/// Positions of the rank at `index`, in the order in which it stores them. All ranks hold equally many positions.
///
/// A ring splits the sequence into 2r chunks and gives rank i the chunks i and 2r-1-i. Later queries attend to more
/// keys, so this balances the work. Ulysses splits the positions of its ring rank into u pieces.
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
/// If `seq` is not a [`multiple`] required by the degrees, or `index` is out of range.
pub fn runs(
    kind: ContextKind,
    seq: usize,
    (ulysses, ring): (usize, usize),
    index: usize,
) -> Vec<Run> {
    assert!(
        index < ulysses * ring,
        "rank {index} is out of range: the context has {ulysses} · {ring}"
    );
    let step = multiple((ulysses, ring));
    assert!(seq.is_multiple_of(step), "seq={seq} is not a multiple of {step} ({kind:?})");
    let shard = ring_shard(seq, ring, index / ulysses);
    let piece = seq / ring / ulysses;
    slice(&shard, Run { start: index % ulysses * piece, len: piece })
}

/// Required divisor of the sequence length, so that all ranks hold equally many positions: 2r for a ring, u for
/// Ulysses.
pub fn multiple((ulysses, ring): (usize, usize)) -> usize {
    match (ulysses.is_multiple_of(2), ring) {
        (_, 1) => ulysses,
        (true, _) => ring * ulysses,
        (false, _) => 2 * ring * ulysses,
    }
}

/// Positions that a ring rank holds together with its Ulysses neighbours. Adjacent chunks are merged into one run.
pub fn ring_shard(seq: usize, ring: usize, rank: usize) -> Vec<Run> {
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

/// The elements `range` of the concatenated runs.
fn slice(runs: &[Run], range: Run) -> Vec<Run> {
    let mut before = 0;
    let piece = |run: &Run| {
        let first = before;
        before += run.len;
        let part = Run { start: first, len: run.len }.overlap(range)?;
        Some(Run { start: run.start + part.start - first, len: part.len })
    };
    runs.iter().filter_map(piece).collect()
}

/// Checks that the context degree fits the sequence and the heads. The error has the form `problem; suggestion`.
/// Heads are counted per tensor rank.
pub fn check(
    kind: ContextKind,
    context: usize,
    seq: usize,
    heads: usize,
    kv_heads: usize,
) -> Result<(), String> {
    if context == 0 {
        return Err("context must be at least 1 (got 0); use 1".into());
    }
    let (ulysses, ring) = degrees(kind, context, heads, kv_heads);
    if !divides_heads(ulysses, heads, kv_heads) {
        return Err(indivisible_heads(ulysses, heads, kv_heads));
    }
    let step = multiple((ulysses, ring));
    if !seq.is_multiple_of(step) {
        let near = near::multiples(seq, step);
        let why = match (ulysses, ring) {
            (_, 1) => format!("ulysses splits it into {ulysses}"),
            (1, _) => format!("a ring of {ring} splits it into {step}"),
            _ => format!("ulysses={ulysses} in a ring of {ring} splits it into {step}"),
        };
        return Err(format!("seq={seq} is not a multiple of {step}: {why}; use {near}"));
    }
    Ok(())
}

/// Whether heads can be distributed evenly over `ulysses` ranks: equally many query heads per rank, and either equally
/// many KV heads per rank or equally many ranks per KV head.
fn divides_heads(ulysses: usize, heads: usize, kv_heads: usize) -> bool {
    heads.is_multiple_of(ulysses)
        && (kv_heads.is_multiple_of(ulysses) || ulysses.is_multiple_of(kv_heads))
}

fn indivisible_heads(ulysses: usize, heads: usize, kv_heads: usize) -> String {
    let fits = |u: &usize| divides_heads(*u, heads, kv_heads);
    let below = (1..ulysses.min(heads + 1)).rev().find(fits);
    let above = (ulysses + 1..=heads).find(fits);
    let near = near::either(below, above);
    let message = match heads.is_multiple_of(ulysses) {
        false => format!("context={ulysses} does not divide heads={heads}, as ulysses requires"),
        true => format!(
            "context={ulysses} and kv_heads={kv_heads}: neither divides the other, as ulysses requires"
        ),
    };
    format!("{message}; use {near}, or context_kind = \"ring\"")
}
