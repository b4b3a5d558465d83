//! The spans of all ranks on a common clock.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use lockstep_types::trace::SpanKind;

use super::rank_file::{FileCall, FileSpan, RankTrace};

/// The ranks of a timeline, in order. Times are nanoseconds since its first span.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    pub ranks: Vec<RankTrace>,
    /// By rank and span; `None` for spans that are not calls.
    pub splits: Vec<Vec<Option<CallSplit>>>,
}

/// How a call divides into waiting and moving data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallSplit {
    /// Nanoseconds from the start of the call until its last member arrived.
    pub waiting: u64,
    /// The member that arrived last: its index in `Timeline::ranks`, and its span.
    pub last: (usize, usize),
}

/// Identity of a call: group, number, and the two ends of a message.
type CallKey = (u64, u64, Option<(u32, u32)>);

fn key(call: &FileCall) -> CallKey {
    (call.id, call.seq, call.message)
}

impl Timeline {
    /// Reads the rank files in a folder.
    pub fn read(folder: &Path) -> io::Result<Timeline> {
        let mut ranks = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with("rank-") && name.ends_with(".json.gz") {
                ranks.push(RankTrace::read(&path)?);
            }
        }
        if ranks.is_empty() {
            let text = format!("{} has no files of ranks", folder.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        Ok(Timeline::new(ranks))
    }

    /// Moves the spans to the common clock and splits the calls.
    pub fn new(mut ranks: Vec<RankTrace>) -> Timeline {
        ranks.sort_by_key(|rank| rank.rank);
        let first =
            |rank: &RankTrace| rank.spans.iter().map(|span| rank.clock.map(span.start)).min();
        let zero = ranks.iter().filter_map(first).min().unwrap_or(0);
        for rank in &mut ranks {
            let clock = rank.clock;
            let map = |time: u64| (clock.map(time) - zero).max(0) as u64;
            for span in &mut rank.spans {
                let end = map(span.end());
                span.start = map(span.start);
                span.duration = end - span.start;
            }
            rank.memory.iter_mut().for_each(|sample| sample.at = map(sample.at));
            // Spans are recorded when they end; a parent comes before its children.
            let is_leaf = |kind| matches!(kind, SpanKind::Kernel | SpanKind::Call);
            rank.spans.sort_by_key(|span| {
                (span.start, std::cmp::Reverse(span.duration), is_leaf(span.kind))
            });
        }
        let splits = splits(&ranks);
        Timeline { ranks, splits }
    }

    /// The largest alignment error of a rank's clock, in seconds.
    pub fn alignment_error(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.clock.error).fold(0.0, f64::max) / 1e9
    }

    /// The first and the last traced step.
    pub fn steps(&self) -> Option<(u64, u64)> {
        let steps = || self.ranks.iter().flat_map(|rank| &rank.steps).map(|time| time.step);
        Some((steps().min()?, steps().max()?))
    }

    /// All calls with members on several ranks: the spans of each.
    pub fn calls(&self) -> Vec<Vec<(usize, usize)>> {
        let mut calls: Vec<_> =
            members(&self.ranks).into_values().filter(|m| m.len() > 1).collect();
        calls.sort();
        calls
    }
}

impl RankTrace {
    /// The thread that takes the steps.
    pub fn main_thread(&self) -> Option<u32> {
        self.spans.iter().find(|span| span.kind == SpanKind::Step).map(|span| span.thread)
    }

    /// The span of a step.
    pub fn step_span(&self, step: u64) -> Option<&FileSpan> {
        self.spans.iter().find(|span| span.kind == SpanKind::Step && span.step == Some(step))
    }
}

fn members(ranks: &[RankTrace]) -> HashMap<CallKey, Vec<(usize, usize)>> {
    let mut members: HashMap<CallKey, Vec<(usize, usize)>> = HashMap::new();
    for (rank, trace) in ranks.iter().enumerate() {
        for (index, span) in trace.spans.iter().enumerate() {
            if let Some(call) = span.call.as_ref().filter(|call| call.members > 1) {
                members.entry(key(call)).or_default().push((rank, index));
            }
        }
    }
    members
}

/// A collective moves data once its last member has arrived. A receiver waits for the sender to start, and a sender for
/// nobody: a message is buffered or taken.
fn splits(ranks: &[RankTrace]) -> Vec<Vec<Option<CallSplit>>> {
    let mut splits: Vec<Vec<Option<CallSplit>>> =
        ranks.iter().map(|rank| vec![None; rank.spans.len()]).collect();
    for spans in members(ranks).into_values() {
        let start = |(rank, index): (usize, usize)| ranks[rank].spans[index].start;
        let Some(last) = spans.iter().copied().max_by_key(|at| (start(*at), at.0)) else {
            continue;
        };
        for (rank, index) in spans {
            let span = &ranks[rank].spans[index];
            let is_sender = span
                .call
                .as_ref()
                .and_then(|call| call.message)
                .is_some_and(|(from, _)| from as usize == ranks[rank].rank);
            let waiting = start(last).saturating_sub(span.start).min(span.duration);
            let waiting = if is_sender { 0 } else { waiting };
            splits[rank][index] = Some(CallSplit { waiting, last });
        }
    }
    splits
}
