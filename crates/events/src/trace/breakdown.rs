//! Where a rank's time goes in the traced steps.

use std::collections::BTreeMap;

use lockstep_types::trace::SpanKind;
use serde::Serialize;

use super::Timeline;
use super::rank_file::{FileSpan, RankTrace};

/// Times of one rank in seconds per step, averaged over the traced steps.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Breakdown {
    pub rank: usize,
    /// Number of steps.
    pub steps: usize,
    pub step: f64,
    /// Everything except exposed communication and reading samples.
    pub compute: f64,
    /// Exposed communication of all axes.
    pub exposed: f64,
    pub axes: Vec<AxisTime>,
    /// Waiting for messages of other pipeline stages; a part of `exposed`.
    pub bubble: f64,
    pub forward: f64,
    pub backward: f64,
    pub recompute: f64,
    pub optimizer: f64,
    pub data: f64,
    /// Snapshots of checkpoints, between the steps.
    pub checkpoint: f64,
    /// Evaluations, between the steps.
    pub evaluation: f64,
    /// Device operations by class, largest first.
    pub kernels: Vec<KernelTime>,
}

/// Exposed communication of an axis.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct AxisTime {
    pub axis: String,
    pub total: f64,
    /// Waiting for peers that had not arrived yet.
    pub waiting: f64,
    /// Moving data, and waiting for a communication thread that does.
    pub moving: f64,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct KernelTime {
    pub class: String,
    pub seconds: f64,
    /// Operations per step.
    pub count: f64,
}

impl Timeline {
    /// Times of each rank.
    pub fn breakdowns(&self) -> Vec<Breakdown> {
        (0..self.ranks.len()).map(|rank| self.breakdown(rank)).collect()
    }

    fn breakdown(&self, index: usize) -> Breakdown {
        let rank = &self.ranks[index];
        let Some(main) = rank.main_thread() else {
            return Breakdown { rank: rank.rank, ..Breakdown::default() };
        };
        let steps: Vec<&FileSpan> =
            rank.spans.iter().filter(|span| span.kind == SpanKind::Step).collect();
        let count = steps.len().max(1) as f64;
        let per_step = |nanos: u64| nanos as f64 / 1e9 / count;
        let mut labels: BTreeMap<String, u64> = BTreeMap::new();
        for step in &steps {
            for (label, nanos) in rank.self_times(main, step.start, step.end()) {
                *labels.entry(label).or_default() += nanos;
            }
        }
        let label = |name: &str| per_step(labels.get(name).copied().unwrap_or(0));
        let between = |kind: SpanKind| {
            let own = |span: &&FileSpan| span.kind == kind && span.thread == main;
            per_step(rank.spans.iter().filter(own).map(|span| span.duration).sum())
        };
        let axes = self.axes(index, main, &steps);
        let exposed: f64 = axes.iter().map(|axis| axis.total).sum();
        let step = per_step(steps.iter().map(|span| span.duration).sum());
        let bubble = axes.iter().filter(|axis| axis.axis == "pipe").map(|axis| axis.waiting).sum();
        Breakdown {
            rank: rank.rank,
            steps: steps.len(),
            step,
            compute: (step - exposed - label("data")).max(0.0),
            exposed,
            axes,
            bubble,
            forward: label("forward"),
            backward: label("backward") + label("weight gradients"),
            recompute: label("recompute"),
            optimizer: label("optimizer"),
            data: label("data"),
            checkpoint: between(SpanKind::Checkpoint),
            evaluation: between(SpanKind::Evaluation),
            kernels: kernels(rank, &steps, count),
        }
    }

    /// Exposed communication of a rank by axis, largest first.
    fn axes(&self, index: usize, main: u32, steps: &[&FileSpan]) -> Vec<AxisTime> {
        let rank = &self.ranks[index];
        let inside = |span: &FileSpan| {
            steps.iter().any(|step| step.start <= span.start && span.end() <= step.end())
        };
        let mut times: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        let mut last: Option<&FileSpan> = None;
        for (number, span) in rank.spans.iter().enumerate().filter(|(_, s)| s.thread == main) {
            match span.kind {
                SpanKind::Exposed if inside(span) => {
                    times.entry(&span.name).or_default().0 += span.duration;
                    last = Some(span);
                }
                SpanKind::Call => {
                    let Some(open) = last.filter(|open| span.end() <= open.end()) else { continue };
                    let waiting = self.splits[index][number].map_or(0, |split| split.waiting);
                    times.entry(&open.name).or_default().1 += waiting;
                }
                _ => {}
            }
        }
        let seconds = |nanos: u64| nanos as f64 / 1e9 / steps.len().max(1) as f64;
        let axis = |(axis, (total, waiting)): (&str, (u64, u64))| AxisTime {
            axis: axis.to_string(),
            total: seconds(total),
            waiting: seconds(waiting),
            moving: seconds(total.saturating_sub(waiting)),
        };
        let mut axes: Vec<AxisTime> = times.into_iter().map(axis).collect();
        axes.sort_by(|a, b| b.total.total_cmp(&a.total));
        axes
    }
}

fn kernels(rank: &RankTrace, steps: &[&FileSpan], count: f64) -> Vec<KernelTime> {
    let mut classes: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for span in rank.spans.iter().filter(|span| span.kind == SpanKind::Kernel) {
        if steps.iter().any(|step| step.start <= span.start && span.start < step.end()) {
            let (nanos, calls) = classes.entry(&span.name).or_default();
            *nanos += span.duration;
            *calls += 1;
        }
    }
    let mut kernels: Vec<KernelTime> = classes
        .into_iter()
        .map(|(class, (nanos, calls))| KernelTime {
            class: class.to_string(),
            seconds: nanos as f64 / 1e9 / count,
            count: calls as f64 / count,
        })
        .collect();
    kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    kernels
}

impl RankTrace {
    /// Time between `from` and `to` on a thread by activity. Nested spans count as the innermost one; kernels and calls
    /// belong to the span around them.
    pub fn self_times(&self, thread: u32, from: u64, to: u64) -> BTreeMap<String, u64> {
        let mut times: BTreeMap<String, u64> = BTreeMap::new();
        let mut add = |label: &str, start: u64, end: u64| {
            let (start, end) = (start.max(from), end.min(to));
            if start < end {
                *times.entry(label.to_string()).or_default() += end - start;
            }
        };
        let mut open: Vec<(u64, String)> = vec![(to, "other".into())];
        let mut now = from;
        let skipped = |kind: SpanKind| matches!(kind, SpanKind::Kernel | SpanKind::Call);
        for span in self.spans.iter().filter(|s| s.thread == thread && !skipped(s.kind)) {
            if span.end() <= from || span.start >= to {
                continue;
            }
            while let Some((end, label)) = open.pop_if(|(end, _)| *end <= span.start) {
                add(&label, now, end);
                now = now.max(end);
            }
            if let Some((_, label)) = open.last() {
                add(label, now, span.start);
            }
            now = now.max(span.start);
            open.push((span.end(), activity(span)));
        }
        while let Some((end, label)) = open.pop() {
            add(&label, now, end);
            now = now.max(end);
        }
        times
    }
}

/// Name of what a span does.
fn activity(span: &FileSpan) -> String {
    match span.kind {
        SpanKind::Exposed => format!("exposed {}", span.name),
        SpanKind::Step | SpanKind::Pass => "other".into(),
        SpanKind::Block => span.name.clone(),
        kind => kind.name().into(),
    }
}
