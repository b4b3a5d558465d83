//! The critical path of a step: starting from the rank that ends last, back through what it did, and from every wait to
//! the rank that it waited for. Shortening anything else does not shorten the step.

use std::collections::BTreeMap;

use lockstep_types::trace::SpanKind;
use serde::Serialize;

use super::Timeline;

/// The critical path of one step.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CriticalPath {
    pub step: u64,
    /// Length in seconds.
    pub seconds: f64,
    /// Parts in order of time.
    pub parts: Vec<PathPart>,
}

/// A stretch of the path on one rank.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PathPart {
    pub rank: usize,
    /// Nanoseconds on the common clock.
    pub start: u64,
    pub end: u64,
    /// Nanoseconds by activity.
    pub activities: BTreeMap<String, u64>,
    /// The call in which the next rank of the path waited for this one.
    pub then: Option<String>,
}

impl CriticalPath {
    /// Seconds by rank and activity, largest first.
    pub fn totals(&self) -> Vec<(usize, String, f64)> {
        let mut totals: BTreeMap<(usize, &str), u64> = BTreeMap::new();
        for part in &self.parts {
            for (activity, nanos) in &part.activities {
                *totals.entry((part.rank, activity)).or_default() += nanos;
            }
        }
        let mut totals: Vec<_> = totals
            .into_iter()
            .map(|((rank, activity), nanos)| (rank, activity.to_string(), nanos as f64 / 1e9))
            .collect();
        totals.sort_by(|a, b| b.2.total_cmp(&a.2));
        totals
    }
}

/// A wait that another rank ended.
struct Wait {
    /// When it ended.
    until: u64,
    /// Index of the rank that ended it.
    by: usize,
    call: String,
}

impl Timeline {
    /// The critical path of a traced step.
    pub fn critical_path(&self, step: u64) -> Option<CriticalPath> {
        let spans = self.ranks.iter().enumerate();
        let spans = spans.filter_map(|(rank, trace)| Some((rank, trace.step_span(step)?)));
        let spans: Vec<_> = spans.collect();
        let (last, end) =
            spans.iter().map(|(rank, span)| (*rank, span.end())).max_by_key(|s| s.1)?;
        let begin = spans.iter().map(|(_, span)| span.start).min()?;
        let waits: Vec<Vec<Wait>> =
            (0..self.ranks.len()).map(|rank| self.waits(rank, begin, end)).collect();
        let (mut rank, mut now, mut then) = (last, end, None);
        let mut parts = Vec::new();
        loop {
            let before = waits[rank].partition_point(|wait| wait.until < now);
            let wait = before.checked_sub(1).map(|index| &waits[rank][index]);
            let start = wait.map_or(begin, |wait| wait.until);
            let own_start = self.ranks[rank].step_span(step).map_or(begin, |span| span.start);
            let from = if wait.is_none() { own_start.min(now) } else { start };
            let thread = self.ranks[rank].main_thread().unwrap_or(0);
            parts.push(PathPart {
                rank: self.ranks[rank].rank,
                start: from,
                end: now,
                activities: self.ranks[rank].self_times(thread, from, now),
                then: then.take(),
            });
            let Some(wait) = wait else { break };
            (rank, now, then) = (wait.by, wait.until, Some(wait.call.clone()));
        }
        parts.reverse();
        Some(CriticalPath { step, seconds: (end - begin) as f64 / 1e9, parts })
    }

    /// Waits of a rank's main thread between two times, in order of their end: calls on that thread, and calls of
    /// communication threads that ended their wait while the main thread waited for them.
    fn waits(&self, rank: usize, begin: u64, end: u64) -> Vec<Wait> {
        let trace = &self.ranks[rank];
        let Some(main) = trace.main_thread() else { return Vec::new() };
        let exposed: Vec<(u64, u64)> = trace
            .spans
            .iter()
            .filter(|span| span.kind == SpanKind::Exposed && span.thread == main)
            .map(|span| (span.start, span.end()))
            .collect();
        let is_exposed = |at: u64| {
            let next = exposed.partition_point(|(start, _)| *start <= at);
            next > 0 && at <= exposed[next - 1].1
        };
        let mut waits = Vec::new();
        for (span, split) in trace.spans.iter().zip(&self.splits[rank]) {
            let Some(split) = split.filter(|split| split.waiting > 0 && split.last.0 != rank)
            else {
                continue;
            };
            let until = span.start + split.waiting;
            let on_path = span.thread == main || is_exposed(until);
            if on_path && begin < until && until < end {
                let group = span.call.as_ref().map_or("", |call| call.group.as_str());
                waits.push(Wait {
                    until,
                    by: split.last.0,
                    call: format!("{} ({group})", span.name),
                });
            }
        }
        waits.sort_by_key(|wait| wait.until);
        waits
    }
}
