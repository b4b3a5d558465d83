//! A timeline as text, and the comparison of two.

use std::fmt::Write as _;

use lockstep_types::trace::SpanKind;

use super::{Breakdown, CriticalPath, Timeline};
use crate::units::MemoryUnit;

/// Number of spans that are listed.
const LONGEST: usize = 10;
/// Smallest fraction of a step that is listed.
const MIN_SHARE: f64 = 5e-4;

/// Times per rank, the critical path of the slowest step, and the longest spans.
pub fn report(timeline: &Timeline) -> String {
    let mut text = String::new();
    let breakdowns = timeline.breakdowns();
    let (first, last) = timeline.steps().unwrap_or((0, 0));
    let run = timeline.ranks.first().map_or("", |rank| rank.run.as_str());
    let spans: usize = timeline.ranks.iter().map(|rank| rank.spans.len()).sum();
    let _ = writeln!(
        text,
        "timeline of {run}, steps {first} to {last}: {} rank(s), {spans} spans; clocks aligned within {:.0} µs",
        timeline.ranks.len(),
        1e6 * timeline.alignment_error()
    );
    let dropped: u64 = timeline.ranks.iter().map(|rank| rank.dropped).sum();
    if dropped > 0 {
        let _ = writeln!(text, "{dropped} spans are missing; trace fewer steps");
    }
    let _ = writeln!(text, "\nper rank, ms per step:");
    let _ = writeln!(text, "{}", table_header());
    breakdowns.iter().for_each(|rank| text.push_str(&table_row(rank)));
    text.push_str(&axes(&breakdowns));
    text.push_str(&kernels(&breakdowns));
    let slowest = timeline.ranks.iter().flat_map(|rank| &rank.steps);
    let slowest = slowest.max_by(|a, b| a.seconds.total_cmp(&b.seconds)).map(|time| time.step);
    if let Some(path) = slowest.and_then(|step| timeline.critical_path(step)) {
        text.push_str(&critical_path(&path));
    }
    text.push_str(&longest(timeline));
    text
}

fn table_header() -> String {
    format!(
        "{:>5} {:>9} {:>9} {:>9} {:>8} {:>8} {:>7} {:>9} {:>9} {:>10} {:>7} {:>10} {:>10}",
        "rank",
        "step",
        "busy",
        "exposed",
        "waiting",
        "moving",
        "bubble",
        "forward",
        "backward",
        "recompute",
        "data",
        "optimizer",
        "checkpoint"
    )
}

fn table_row(rank: &Breakdown) -> String {
    let ms = |seconds: f64| 1e3 * seconds;
    let waiting: f64 = rank.axes.iter().map(|axis| axis.waiting).sum();
    let moving: f64 = rank.axes.iter().map(|axis| axis.moving).sum();
    format!(
        "{:>5} {:>9.2} {:>9.2} {:>9.2} {:>8.2} {:>8.2} {:>7.2} {:>9.2} {:>9.2} {:>10.2} {:>7.2} {:>10.2} {:>10.2}\n",
        rank.rank,
        ms(rank.step),
        ms(rank.compute),
        ms(rank.exposed),
        ms(waiting),
        ms(moving),
        ms(rank.bubble),
        ms(rank.forward),
        ms(rank.backward),
        ms(rank.recompute),
        ms(rank.data),
        ms(rank.optimizer),
        ms(rank.checkpoint)
    )
}

/// Mean over the ranks of exposed communication by axis.
fn axes(breakdowns: &[Breakdown]) -> String {
    let step = mean(breakdowns, |rank| rank.step);
    let mut means = mean_axes(breakdowns);
    means.retain(|(_, total, _)| *total >= MIN_SHARE * step);
    if means.is_empty() || step == 0.0 {
        return String::new();
    }
    let axis = |(axis, total, waiting): &(String, f64, f64)| {
        format!(
            "{axis} {:.1}% of the step ({:.2} ms waiting for peers, {:.2} ms moving data)",
            100.0 * total / step,
            1e3 * waiting,
            1e3 * (total - waiting)
        )
    };
    format!("\nexposed communication: {}\n", means.iter().map(axis).collect::<Vec<_>>().join("; "))
}

fn mean_axes(breakdowns: &[Breakdown]) -> Vec<(String, f64, f64)> {
    let mut means: Vec<(String, f64, f64)> = Vec::new();
    let count = breakdowns.len().max(1) as f64;
    for axis in breakdowns.iter().flat_map(|rank| &rank.axes) {
        let index = means.iter().position(|mean| mean.0 == axis.axis).unwrap_or_else(|| {
            means.push((axis.axis.clone(), 0.0, 0.0));
            means.len() - 1
        });
        means[index].1 += axis.total / count;
        means[index].2 += axis.waiting / count;
    }
    means.sort_by(|a, b| b.1.total_cmp(&a.1));
    means
}

/// Device operations of the rank that computes most.
fn kernels(breakdowns: &[Breakdown]) -> String {
    let busiest = breakdowns.iter().max_by(|a, b| a.compute.total_cmp(&b.compute));
    let Some(busiest) = busiest.filter(|rank| !rank.kernels.is_empty()) else {
        return String::new();
    };
    let mut text = format!("\noperations of rank {}, ms per step:\n", busiest.rank);
    for kernel in &busiest.kernels {
        let _ = writeln!(
            text,
            "{:>14} {:>9.2} {:>5.1}% {:>7.0} calls",
            kernel.class,
            1e3 * kernel.seconds,
            100.0 * kernel.seconds / busiest.step.max(f64::MIN_POSITIVE),
            kernel.count
        );
    }
    text
}

fn critical_path(path: &CriticalPath) -> String {
    let ranks: Vec<usize> = path.parts.iter().map(|part| part.rank).collect();
    let jumps = ranks.windows(2).filter(|two| two[0] != two[1]).count();
    let mut text = format!(
        "\ncritical path of step {} ({:.2} ms, {jumps} change(s) of rank):\n",
        path.step,
        1e3 * path.seconds
    );
    let totals = path.totals().into_iter().filter(|(.., s)| *s >= MIN_SHARE * path.seconds);
    for (rank, activity, seconds) in totals.take(LONGEST) {
        let share = 100.0 * seconds / path.seconds.max(f64::MIN_POSITIVE);
        let name = format!("rank {rank} {activity}");
        let _ = writeln!(text, "{name:>28} {:>9.2} ms {share:>5.1}%", 1e3 * seconds);
    }
    text
}

fn longest(timeline: &Timeline) -> String {
    let listed = |kind: SpanKind| {
        !matches!(kind, SpanKind::Step | SpanKind::Pass | SpanKind::Exposed | SpanKind::Kernel)
    };
    let mut spans: Vec<_> = timeline
        .ranks
        .iter()
        .flat_map(|rank| rank.spans.iter().map(move |span| (rank, span)))
        .filter(|(_, span)| listed(span.kind))
        .collect();
    spans.sort_by_key(|(_, span)| std::cmp::Reverse(span.duration));
    let mut text = "\nlongest spans:\n".to_string();
    for (rank, span) in spans.into_iter().take(LONGEST) {
        let block = span.block.and_then(|block| rank.blocks.get(block as usize));
        let mut about = block.map_or(String::new(), |block| format!(" {block}"));
        if let Some(micro) = span.micro {
            let _ = write!(about, ", micro-batch {micro}");
        }
        if let Some(call) = &span.call {
            let bytes = span.bytes.unwrap_or(0);
            let unit = MemoryUnit::of(bytes);
            let _ =
                write!(about, " #{} in {} ({} {unit})", call.seq, call.group, unit.number(bytes));
        }
        let _ = writeln!(
            text,
            "{:>9.2} ms  rank {} at {:.2} ms: {}{about}",
            span.duration as f64 / 1e6,
            rank.rank,
            span.start as f64 / 1e6,
            span.name
        );
    }
    text
}

fn mean(breakdowns: &[Breakdown], of: impl Fn(&Breakdown) -> f64) -> f64 {
    breakdowns.iter().map(of).sum::<f64>() / breakdowns.len().max(1) as f64
}

/// Means over the ranks of two timelines side by side.
pub fn compare(one: &Timeline, other: &Timeline) -> String {
    let (a, b) = (one.breakdowns(), other.breakdowns());
    let mut rows: Vec<(String, f64, f64)> = Vec::new();
    type Part = (&'static str, fn(&Breakdown) -> f64);
    let parts: [Part; 10] = [
        ("step", |rank| rank.step),
        ("busy", |rank| rank.compute),
        ("forward", |rank| rank.forward),
        ("backward", |rank| rank.backward),
        ("recompute", |rank| rank.recompute),
        ("optimizer", |rank| rank.optimizer),
        ("data", |rank| rank.data),
        ("exposed", |rank| rank.exposed),
        ("bubble", |rank| rank.bubble),
        ("checkpoint", |rank| rank.checkpoint),
    ];
    for (name, of) in parts {
        rows.push((name.into(), mean(&a, of), mean(&b, of)));
    }
    let (ours, theirs) = (mean_axes(&a), mean_axes(&b));
    let find = |axes: &[(String, f64, f64)], name: &str| {
        axes.iter().find(|axis| axis.0 == name).map_or(0.0, |axis| axis.1)
    };
    for axis in lockstep_types::trace::CommAxis::ALL {
        let (x, y) = (find(&ours, axis.name()), find(&theirs, axis.name()));
        if x + y > 0.0 {
            rows.push((format!("exposed {}", axis.name()), x, y));
        }
    }
    let mut text =
        format!("{:>16} {:>10} {:>10} {:>10}\n", "ms per step", "first", "second", "change");
    for (name, x, y) in rows {
        let change = match x > 0.0 {
            true => format!("{:+.1}%", 100.0 * (y / x - 1.0)),
            false => "–".into(),
        };
        let _ = writeln!(text, "{name:>16} {:>10.2} {:>10.2} {change:>10}", 1e3 * x, 1e3 * y);
    }
    text
}
